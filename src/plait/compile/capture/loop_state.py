"""What a loop over experts has to leave as it was, because its body runs once: see expert_loops.py."""

from __future__ import annotations

import dis
import inspect
import types
from collections.abc import Iterator
from types import FrameType
from typing import Any

from torch import Tensor, nn
from torch.fx import Node

from plait.compile.capture.graph_recorder import GraphRecorder
from plait.compile.capture.masked_rows import dynamic
from plait.compile.capture.python_state import MISSING
from plait.compile.capture.reachable import Reached
from plait.compile.ir.calls import is_view, writes_in_place

_BETWEEN = ("CACHE", "EXTENDED_ARG")  # instructions that do nothing
_RESUMED = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


class LoopState:
    """The Python values that the body of a loop can reach, as they were before the loop.

    These are `locals`, and what they, the function and the globals that it names lead to.
    """

    def __init__(self, frame: FrameType) -> None:
        code = frame.f_code
        self.locals = dict(frame.f_locals)
        cells = tuple(types.CellType(frame.f_locals.get(name)) for name in code.co_freevars)
        function = types.FunctionType(code, frame.f_globals, closure=cells)
        self._reached = Reached(nn.Module(), [self.locals, function])

    def changes(self) -> Iterator[tuple[Any, Any]]:
        """Each value that is another one now, and what it is now."""
        for holder in self._reached.holders:
            if not holder.is_same():
                now, before = holder.now(), holder.before
                for key in now.keys() | before.keys():
                    pair = before.get(key, MISSING), now.get(key, MISSING)
                    if pair[0] is not pair[1]:
                        yield pair
        yield from ((MISSING, filled) for filled in self._reached.empty if filled)
        for _, values, content in self._reached.arrays:
            if values.tobytes() != content:
                yield content, values


class Totals:
    """The values to which the rounds of a loop add rows.

    A round adds to what the round before it has left. If the result of an addition is another tensor, as of
    `out = out.index_add(...)`, only a second round shows whether it goes on from that.
    """

    def __init__(self, recorder: GraphRecorder) -> None:
        self._recorder = recorder
        self._start = last_call(recorder)
        self._now: list[Tensor] = []
        self._number: dict[int, int] = {}  # by the id of a tensor that is, or was, a total
        self.has_copies = False  # whether an addition gave another tensor

    def number_of(self, x: Tensor) -> int:
        """The number of the total that `x` is. Raises if it is an earlier one, or made by the loop."""
        if id(x) not in self._number:
            if self._recorder.node_of(x) in calls_since(self._recorder, self._start):
                raise dynamic()
            self._number[id(x)] = len(self._now)
            self._now.append(x)
        number = self._number[id(x)]
        if self._now[number] is not x:
            raise dynamic()
        return number

    def become(self, number: int, found: Tensor) -> None:
        """Let the total be `found` from now on."""
        self.has_copies |= found is not self._now[number]
        self._now[number] = found
        self._number[id(found)] = number

    def is_one(self, x: object) -> bool:
        """Whether `x` is a total as it is now."""
        return id(x) in self._number and self._now[self._number[id(x)]] is x

    def was_one(self, x: object) -> bool:
        """Whether `x` is a total before rows were added to it."""
        return id(x) in self._number and not self.is_one(x)


def is_settled(recorder: GraphRecorder, node: Node, root: Node) -> bool:
    """Whether no call has changed in place what the node is computed from."""
    if not recorder.mutating:
        return True
    bases, queue = {_base(root)}, [node]
    for one in queue:
        if one is not root and _base(one) not in bases:
            bases.add(_base(one))
            queue += one.all_input_nodes
    written = (one for one in recorder.graph.nodes if writes_in_place(one))
    return not any(_base(source) in bases for one in written for source in one.all_input_nodes)


def _base(node: Node) -> Node:
    """What the value is a view of."""
    while node.op == "call_function" and is_view(node):
        node = node.all_input_nodes[0]
    return node


def last_call(recorder: GraphRecorder) -> Node:
    node: Node = next(iter(reversed(recorder.graph.nodes)))
    return node


def calls_since(recorder: GraphRecorder, last: Node) -> list[Node]:
    """The calls that were recorded after `last`."""
    found = []
    for node in reversed(recorder.graph.nodes):
        if node is last:
            break
        if node.op == "call_function":
            found.append(node)
    return found


def check_loop(frame: FrameType) -> None:
    """Raise unless the frame begins a `for` statement whose rounds leave nothing but what they assign.

    A comprehension collects a value from each round, as does what reads a generator.
    """
    code = frame.f_code.co_code
    following = (dis.opname[code[at]] for at in range(frame.f_lasti + 2, len(code), 2))
    is_statement = next((name for name in following if name not in _BETWEEN), None) == "FOR_ITER"
    if (
        dis.opname[code[frame.f_lasti]] != "GET_ITER"  # such as of enumerate, which counts rounds
        or not is_statement
        or frame.f_code.co_flags & _RESUMED
    ):
        raise dynamic()
