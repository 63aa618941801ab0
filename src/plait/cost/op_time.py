"""The time of one op on a device: as it was measured, or a roofline with efficiency curves.

(Williams et al. 2009, "Roofline: An Insightful Visual Performance Model for Multicore Architectures".)
"""

from __future__ import annotations

import math
from collections import defaultdict

from plait.cost.step_program import OpCall
from plait.spec.cluster import CallTime, Cluster, DeviceSpec


def op_time(device: DeviceSpec, flops: float, num_bytes: float, dtype: str, attention: bool = False) -> float:
    """Seconds of an op that takes `flops` floating-point operations in `dtype` and reads and writes `num_bytes`.

    Attention that stores no scores reaches the part of it that the device says.
    """
    if attention:
        return op_time(device, flops, num_bytes, dtype) / device.attention_efficiency
    computes = moves = 0.0
    if flops:
        computes = flops / (device.peak_of(dtype) * device.matmul_efficiency.at(flops))
    if num_bytes:
        moves = num_bytes / (device.memory_bandwidth * device.memory_efficiency.at(num_bytes))
    return device.op_seconds + (max(computes, moves) if device.overlaps else computes + moves)


class CallTimes:
    """The seconds of calls on the devices of a cluster.

    A call that was measured takes as long as then. Another call of the same op and dtype takes the roofline's time,
    times what the measured call that is nearest in size took over its own.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._device = cluster.device
        self._measured = {each.signature: each.seconds for each in cluster.calls}
        self._by_op: dict[tuple[str, str], list[CallTime]] = defaultdict(list)
        for each in cluster.calls:
            if each.num_bytes:
                self._by_op[each.signature.partition("(")[0], each.dtype].append(each)

    def measured(self, signature: str) -> float | None:
        """Seconds of a call that was measured; None for others."""
        return self._measured.get(signature)

    def seconds(self, call: OpCall) -> float:
        """Seconds of a call of an op. One without flops and bytes is a view."""
        known = self._measured.get(call.signature)
        if known is not None:
            return known
        if not call.num_bytes and not call.flops:
            return self._device.view_seconds
        return self._estimated(call) + call.parameters * self._device.update_seconds

    def _estimated(self, call: OpCall) -> float:
        """Seconds of a call by the roofline, or by the nearest of its op that was measured."""
        signature, flops, num_bytes, dtype = call.signature, call.flops, call.num_bytes, call.dtype
        alike = self._by_op.get((signature.partition("(")[0], dtype))
        if not alike or not num_bytes:
            return op_time(self._device, flops, num_bytes, dtype, call.attention)
        near = min(alike, key=lambda each: abs(math.log(each.num_bytes / num_bytes)))
        estimate = op_time(self._device, flops, num_bytes, dtype)
        return estimate * near.seconds / op_time(self._device, near.flops, near.num_bytes, dtype)
