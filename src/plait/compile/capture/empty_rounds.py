"""A part of a model that is left out where an expert has no rows, in a graph that has the part in every step.

    for number, expert in enumerate(self.experts):
        token, place = torch.where(ids == number)
        if token.numel() == 0:
            continue
        out[token] += expert(hidden[token]) * scores[token, place, None]

Whether an expert has rows is known only as the step runs. If all that the part does is to add rows of a mask to values,
it adds nothing where the mask selects no row, and may run as well. So Python is told that there are rows. Until it goes
on from where it would have gone without rows, it may do nothing else: no other value changes, in a tensor or in Python,
no number is drawn, and none is computed from several rows. The condition must leave the part out only where masks
select nothing, which is worked out for samples of the numbers that they are computed from.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.fx import Node
from torch.utils._python_dispatch import _disable_current_modes

from plait.compile.capture.branches import Part
from plait.compile.capture.graph_recorder import GraphRecorder
from plait.compile.capture.loop_state import LoopState, calls_since, is_settled, last_call
from plait.compile.capture.masked_rows import Addition, dynamic
from plait.compile.capture.parts_left_out import Condition, ConditionalUses, Truth
from plait.compile.ir.calls import is_tensor, op_spec_of, tensor_inputs, writes_in_place
from plait.compile.ir.rewriting import same_order
from plait.compile.ir.samples import bound_of, known_value, sample_ids, signature, whole_numbers
from plait.compile.ops.draw import draw
from plait.compile.ops.experts import IDS

_MOST_STEPS = 64  # from a condition, or a mask, to the numbers that it is computed from


class RoundAsked(Protocol):
    """A round of a loop over experts, of which Python asks whether it has rows."""

    @property
    def has_rows(self) -> Condition | None: ...


@dataclass
class _Running:
    """A part that runs.

    frame       runs the part
    line        of the branch
    part        where it is
    condition   on which it runs; None if it runs where the rows of `owner` are there
    owner       the round of a loop over experts whose rows are asked for
    runs        what says whether it runs on one device; None if it always does
    last        the last call before
    nodes       the node of each tensor before
    state       the Python values that the part can reach, as they were before
    changed     the local variables that it may assign, before
    num_checks  how many conditions the step had before
    error       says that what the part does depends on numbers
    own         calls that add rows
    totals      values that rows were added to, before and after
    steps       the node of such a value before rows were added, by its node afterwards
    masks       the masks of these rows, which are not those of `owner`
    reduces     whether a number was computed from several rows
    """

    frame: FrameType
    line: int
    part: Part
    condition: Node | None
    owner: RoundAsked | None
    runs: Condition | None
    last: Node
    nodes: dict[int, Node]
    state: LoopState
    changed: dict[str, object]
    num_checks: int
    error: Exception
    own: set[Node] = field(default_factory=set)
    totals: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    steps: dict[Node, Node] = field(default_factory=dict)
    masks: list[Node | None] = field(default_factory=list)
    reduces: bool = False

    def became(self, name: str) -> bool:
        """Whether a local variable is what it was, but for rows that were added."""
        now, before = self.frame.f_locals.get(name), self.changed[name]
        for given, found in reversed(self.totals):
            now = given if now is found else now
        return now is before

    def came_from(self, now: Node, before: Node) -> bool:
        """Whether a value is what it was, but for rows that were added."""
        at: Node | None = now
        while at is not None and at is not before:
            at = self.steps.get(at) or same_order(at)
        return at is before


class EmptyRounds:
    """The parts of a model that run although there may be no rows for them. `checks` are the conditions of the step,
    `left_out` is told what decides whether a part runs on one device."""

    def __init__(self, recorder: GraphRecorder, checks: Sequence[object], left_out: ConditionalUses) -> None:
        self._recorder = recorder
        self._checks = checks
        self._left_out = left_out
        self._running: list[_Running] = []
        self._implied: dict[Hashable, bool] = {}
        self._integers: dict[Node, bool] = {}

    def asks_for_rows(self, condition: Tensor, part: Part) -> bool:
        """Whether a condition may be that there are rows, and the part be what is done with them."""
        node = self._recorder.node_of(condition)
        with _on_cpu():
            return part.is_local and any(
                bool(found) is not part.runs
                for root in _roots(node)
                for given in _samples(root, None)
                if isinstance(found := known_value(node, {root: given}, {}), Tensor) and found.numel() == 1
            )

    def begin(
        self,
        frame: FrameType,
        part: Part,
        error: Exception,
        condition: Tensor | None = None,
        owner: RoundAsked | None = None,
    ) -> None:
        """Let a part run until the frame has left it. Its condition is a tensor, or that there are rows of a round.

        Raises `error`, now or when the frame has left it, if the part may not run without rows."""
        self.notice()
        if not part.is_local:
            raise error
        node = None if condition is None else self._recorder.node_of(condition)
        runs = None if owner is None or part.adds_zeros else owner.has_rows
        if condition is not None and node is not None and not part.adds_zeros:
            runs = Condition(Truth(condition, node, part.runs, self._recorder))
        before = {name: frame.f_locals.get(name) for name in part.changed}
        last, nodes = last_call(self._recorder), dict(self._recorder.nodes)
        self._running.append(
            _Running(
                frame,
                frame.f_lineno,
                part,
                node,
                owner,
                runs,
                last,
                nodes,
                LoopState(frame),
                before,
                len(self._checks),
                error,
            )
        )

    @property
    def conditions(self) -> list[Condition]:
        """What decides, on one device, whether what runs now is run."""
        return [each.runs for each in self._running if each.runs is not None]

    def notice(self) -> None:
        """End the parts that Python has left. Raises if one did more than a part may do."""
        while self._running and self._running[-1].frame.f_lasti not in self._running[-1].part.offsets:
            self._end(self._running.pop())

    def note_addition(self, made: Addition) -> None:
        """Note that rows were added to a value."""
        now = self._recorder.node_of(made.after)
        for each in self._running:
            each.own |= set(made.calls)
            each.totals.append((made.before, made.after))
            if now is not made.was:
                each.steps[now] = made.was
            if made.round is None or each.owner is not made.round:
                each.masks.append(made.mask)

    def note_reduction(self) -> None:
        """Note that a number was computed from several rows, and so may be NaN if there are none."""
        for each in self._running:
            each.reduces = True

    def _end(self, one: _Running) -> None:
        nodes = self._recorder.nodes
        calls = calls_since(self._recorder, one.last)
        if (
            one.reduces
            or (one.condition is not None and any(map(self._counts, calls)))
            or len(self._checks) != one.num_checks
            or any(_has_effect(node) and node not in one.own for node in calls)
            or not all(nodes[key] is node or one.came_from(nodes[key], node) for key, node in one.nodes.items())
            or any(True for _ in one.state.changes())
            or not all(map(one.became, one.changed))
            or not all(self._selects_nothing(one, mask) for mask in one.masks)
        ):
            error: Any = dynamic() if one.totals else one.error
            error.place = one.frame.f_code.co_filename, one.line
            raise error
        if one.runs is not None:
            self._left_out.note_part(calls, one.runs)

    def _counts(self, node: Node) -> bool:
        """Whether a call computes floats from a number of rows, or from another number that comes from integers.

        Without rows its result may be infinite or NaN, such as 1 / 0, and so may its gradient, also where it is
        multiplied by zero."""
        if not is_tensor(node) or not node.meta["val"].dtype.is_floating_point:
            return False
        inputs = tensor_inputs(node)
        if not any(self._is_of_integers(each) for each in inputs) or all(map(self._is_of_integers, inputs)):
            return False
        return node.target not in IDS and op_spec_of(node).access(*node.args, **node.kwargs) is None

    def _is_of_integers(self, node: Node) -> bool:
        """Whether a value is of integers, or of floats that are computed from integers and masks alone."""
        if node not in self._integers:
            value = node.meta["val"] if is_tensor(node) else None
            if value is None or value.dtype == torch.bool:
                self._integers[node] = False
            elif not value.dtype.is_floating_point:
                self._integers[node] = True
            else:
                inputs = tensor_inputs(node) if node.op == "call_function" else []
                whole = all(self._is_of_integers(each) or _is_mask(each) for each in inputs)
                self._integers[node] = bool(inputs) and whole
        return self._integers[node]

    def _selects_nothing(self, one: _Running, mask: Node | None) -> bool:
        """Whether the mask certainly selects no row where the condition leaves the part out."""
        condition = one.condition
        if mask is None or condition is None:
            return False
        for root in _roots(mask):
            if is_settled(self._recorder, mask, root) and is_settled(self._recorder, condition, root):
                key = signature(mask, root), signature(condition, root), one.part.runs
                if key not in self._implied:
                    with _on_cpu():
                        self._implied[key] = _implies(condition, mask, root, one.part.runs)
                if self._implied[key]:
                    return True
        return False


def _is_mask(node: Node) -> bool:
    return is_tensor(node) and node.meta["val"].dtype == torch.bool


def _has_effect(node: Node) -> bool:
    return node.target is draw or op_spec_of(node).random is not None or writes_in_place(node)


@contextmanager
def _on_cpu() -> Iterator[None]:
    """Compute with values, outside of what is captured."""
    with torch._C.DisableTorchFunction(), _disable_current_modes(), torch.no_grad():
        yield


def _roots(node: Node) -> Iterator[Node]:
    """Masks and integers of which something is computed, itself included; the nearest first."""
    seen, queue = {node}, [node]
    for one in queue:
        value = one.meta["val"] if is_tensor(one) else torch.empty(())
        if value.ndim and value.dtype == torch.bool:
            yield one
        elif value.ndim and not value.dtype.is_floating_point and not value.dtype.is_complex:
            root = whole_numbers(one)
            if bound_of(root) is not None:
                yield root
        for source in one.all_input_nodes:
            if source not in seen and len(seen) < _MOST_STEPS:
                seen.add(source)
                queue.append(source)


def _samples(root: Node, mask: Node | None) -> Iterator[Tensor]:
    """Values of a root: masks, or integers up to the bound of the root, also such that few rows are those of `mask`."""
    value = root.meta["val"]
    size, shape = value.numel(), value.shape
    place = torch.arange(size)
    if value.dtype == torch.bool:
        for found in (place < 0, place == 0, place == size - 1, place % 3 == 1, place >= 0):
            yield found.reshape(shape)
        return
    num = bound_of(root)
    assert num is not None
    every = sample_ids(size, num)
    every += [num - 1 - ids for ids in every]
    own = (
        None
        if mask is None
        else next(
            (n for n in range(num) if _selects(mask, root, torch.full((size,), n).to(value.dtype).reshape(shape))), None
        )
    )
    if own is not None:
        every += [torch.where(place < few, own, (own + 1) % num) for few in range(min(size, 6))]
    for ids in every:
        yield ids.to(value.dtype).reshape(shape)


def _selects(mask: Node, root: Node, given: Tensor) -> bool:
    found = known_value(mask, {root: given}, {})
    return isinstance(found, Tensor) and bool(found.any())


def _implies(condition: Node, mask: Node, root: Node, runs: bool) -> bool:
    """Whether the mask selects nothing where the condition is not `runs`, as it is for some samples."""
    is_ever_left_out = False
    for given in _samples(root, mask):
        asked, selected = (known_value(each, {root: given}, {}) for each in (condition, mask))
        if not isinstance(asked, Tensor) or not isinstance(selected, Tensor) or asked.numel() != 1:
            return False
        if bool(asked) is not runs:
            is_ever_left_out = True
            if selected.any():
                return False
    return is_ever_left_out
