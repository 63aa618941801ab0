"""What a sum over ranks sends if it is put off: a partial sum that is weighted and added up first, as the results of a
token's experts are, is smaller where it is summed over ranks than where it arises."""

from __future__ import annotations

from collections.abc import Callable

from torch.fx import Node

from plait.compile.ir.calls import is_item, is_tensor, num_bytes, op_spec_of, tensor_inputs
from plait.compile.ops import Call
from plait.cost.collective_time import ring_bytes

_FAR = 32  # calls behind a value that are looked at


class DeferredSums:
    """The bytes that each of `size` ranks sends for a value if it is summed over ranks as late as pays.

    Calls that are linear in the value alone are looked through, but not products with weights, which may be split.
    `ways` is what a sum sends in units of a reduce-scatter.
    """

    def __init__(self, size: int, call: Callable[[Node], Call], ways: int) -> None:
        self._size = size
        self._call = call
        self._ways = ways
        self._later: dict[Node, float] = {}

    def sent_behind(self, reader: Node, value: Node) -> float | None:
        """The bytes that are sent behind a call that reads `value`; None if it is not better that all its readers put
        the sum off than that it is summed before them."""
        return self._behind(reader, value, _FAR) if self._put_off(value, _FAR) < self._now(value) else None

    def _now(self, value: Node) -> float:
        return self._ways * ring_bytes(num_bytes(value.meta["val"]), self._size)

    def _put_off(self, value: Node, far: int) -> float:
        """What is sent if all readers put the sum off; once it is as much as now, no more is counted."""
        if value not in self._later:
            self._later[value] = found = 0.0
            for reader in value.users:
                found += self._behind(reader, value, far)
                if found >= self._now(value):
                    break
            self._later[value] = found
        return self._later[value]

    def _behind(self, reader: Node, value: Node, far: int) -> float:
        now = self._now(value)
        if reader.op != "call_function" or is_item(reader) or not far:
            return now
        row = op_spec_of(reader)
        if row.reads == "shape":
            return 0.0
        inputs = tensor_inputs(reader)
        alone = (inputs.index(value),)
        if row.weighted or inputs.count(value) != 1 or alone not in row.linear(self._call(reader)):
            return now
        results = [reader] if is_tensor(reader) else [item for item in reader.users if is_tensor(item)]
        return sum(min(self._now(each), self._put_off(each, far - 1)) for each in results)
