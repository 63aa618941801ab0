"""The time of one op on a device: a roofline with efficiency curves (Williams et al. 2009, "Roofline")."""

from __future__ import annotations

from plait.spec.cluster import DeviceSpec


def op_time(device: DeviceSpec, flops: float, num_bytes: float, dtype: str) -> float:
    """Seconds of an op that takes `flops` floating-point operations in `dtype` and reads and writes `num_bytes`."""
    computes = moves = 0.0
    if flops:
        computes = flops / (device.peak_of(dtype) * device.matmul_efficiency.at(flops))
    if num_bytes:
        moves = num_bytes / (device.memory_bandwidth * device.memory_efficiency.at(num_bytes))
    return device.op_seconds + (max(computes, moves) if device.overlaps else computes + moves)
