"""A loop over the experts that are hit, in a graph of fixed shapes: its body runs once, for all experts together.

    mask = one_hot(ids, num_experts).permute(2, 1, 0)
    for expert in (mask.sum((-1, -2)) > 0).nonzero():
        place, token = torch.where(mask[expert[0]])
        out.index_add_(0, token, linear(hidden[token], weight[expert[0]]) * scores[token, place, None])

Each row, a token with one of its experts, is in one round of the loop. If rounds do nothing but add their rows to what
was there before the loop, all rows can be in one: `expert` is then the expert of each row, torch.where gives all rows,
and products with weight[expert] are those of compile/ops/experts.py. What else the body does raises torch's own error
for numbers that are not known. Where adding rows gives another tensor, a second round, without rows, shows whether it
goes on from that. That a mask says which expert each row has is worked out for samples of these.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from plait.compile.capture.branches import read_behind
from plait.compile.capture.expert_modules import ExpertModules
from plait.compile.capture.expert_stand_ins import Answer, ExpertRows, LoopIndex, OwnRow
from plait.compile.capture.graph_recorder import GraphRecorder
from plait.compile.capture.loop_state import LoopState, Totals, calls_since, check_loop, is_settled, last_call
from plait.compile.capture.masked_rows import Addition, Owner, Selected, UnknownCount, dynamic
from plait.compile.capture.parts_left_out import Condition
from plait.compile.ir.calls import is_item, is_tensor, op_spec_of, tensor_inputs, writes_in_place
from plait.compile.ir.rewriting import same_order
from plait.compile.ir.samples import bound_of, computes_same, holds_for_samples, known_value, whole_numbers
from plait.compile.ops.draw import draw

_MOST_STEPS = 64  # from the experts of rows to a mask
_FLAT = -1  # in place of a dim: the number of the row


class ExpertLoop:
    """A loop over the places that a mask selects, for which all rows of all places are one round.

    Python may ask whether the place is a certain number: the rows of that place then are in a round of their own.

    Python may ask for the number, as for `self.experts[expert]`. Then there is a round for each number. The first round
    has all rows, and takes the parameters of all experts, from `modules`, in place of those of its own. The others must
    compute the same, each with the parameters of its own expert, and add nothing.
    """

    def __init__(self, places: Selected, recorder: GraphRecorder, modules: ExpertModules) -> None:
        self.places = places
        self.recorder = recorder
        self.modules = modules
        self.tables: dict[tuple[int, ...], Tensor] = {}  # parameters of all experts, by the ids of these
        self.same: set[tuple[Node, Node]] = set()  # calls of two rounds that compute the same
        self.first_addition = self.last_addition = last_call(recorder)  # the calls before rows are added
        # A total, and the indices and rows that it gets, added with a factor, or with None in place of what was there.
        self.additions: list[tuple[int, Node, Node, float | None]] = []
        self.ids: Tensor | None = None  # [S], the place of each row
        self.root: Node | None = None  # what ids are computed from
        self.order: tuple[int, ...] = ()  # the dims of a mask behind the first, as dims of the root
        self.waiting: list[tuple[dict[int, bool], int | None]] = []
        self.totals = Totals(recorder)
        self.body: ExpertRound | None = None  # the round that runs

    def run(self, frame: FrameType, left: list[ExpertLoop]) -> Iterator[LoopIndex]:
        """The rounds. `frame` runs the loop; a loop that it leaves early is added to `left`."""
        check_loop(frame)
        return self._rounds(left)

    def _rounds(self, left: list[ExpertLoop]) -> Iterator[LoopIndex]:
        state = LoopState(sys._getframe(1))
        first: dict[int, bool] = {}
        self.waiting = [(first, None)]
        has_ended = False
        while self.waiting:
            answers, number = self.waiting.pop(0)
            places = [one for one, same in answers.items() if same] if number is None else [number]
            if any(self.is_beyond(one) for one in places):
                continue
            self.body = body = ExpertRound(self, answers, number, adds=number is None and not has_ended)
            try:
                yield LoopIndex(body, self.places.ndim - 1)
            except GeneratorExit:
                left.append(self)
                raise
            body.check(sys._getframe(1), state)
            self.body = None
            if not self.waiting and not has_ended and body.number is None and self.totals.has_copies:
                self.waiting, has_ended = [(first, None)], True

    def is_beyond(self, number: int) -> bool:
        """Whether no row has this place: there is none, or rows have the places of a topk among fewer."""
        bound = None if self.root is None else bound_of(self.root)
        return not 0 <= number < min(len(self.places.keep), len(self.places.keep) if bound is None else bound)

    def goes_to(self, number: int) -> list[Condition]:
        """What says whether one device runs the round of this place."""
        return [Condition(self, number)]

    def counts(self, by_rows: bool) -> Tensor:
        """For each place the number of its rows, or else whether the loop goes there."""
        if not by_rows:
            return self.places.keep
        assert self.ids is not None
        numbers = torch.arange(len(self.places.keep), device=self.ids.device)
        return (self.ids.unsqueeze(1) == numbers).sum(0)

    def source(self) -> Node:
        """The value that the places of rows are computed from."""
        assert self.root is not None
        return self.root

    def find_rows(self, mask: Tensor) -> None:
        """Find the place of each row from a mask of [places, ...], true at the rows of each place."""
        if mask.ndim < 2:
            raise dynamic()
        node, shape = self.recorder.node_of(mask), mask.shape[1:]
        for root in self.candidates(node, math.prod(shape)):
            value = root.meta["val"]
            for order in itertools.permutations(range(len(shape))) if value.ndim == len(shape) else ():
                if [value.shape[d] for d in order] == list(shape) and self._says(node, root, order, mask.shape[0]):
                    found = self.recorder.tensor_of(root)
                    if found is None or self.root not in (None, root):
                        raise dynamic()
                    self.root, self.order = root, order
                    self.ids = found.reshape(-1) if self.ids is None else self.ids
                    return
        raise dynamic()

    def candidates(self, mask: Node, num_rows: int) -> list[Node]:
        """Integers, one for each row, from which the mask is computed, the nearest first.

        With `num_rows` 0, integers of any number."""
        found: list[Node] = []
        seen, queue = {mask}, [mask]
        for node in queue:
            value = node.meta["val"]
            fits = num_rows in (0, value.numel()) if is_tensor(node) else False
            if node is not mask and fits and not _is_fractional(value):
                found.append(whole_numbers(node))
            for source in node.all_input_nodes:
                if source not in seen and len(seen) < _MOST_STEPS:
                    seen.add(source)
                    queue.append(source)
        return list(dict.fromkeys(found))

    def _says(self, mask: Node, root: Node, order: tuple[int, ...], num: int) -> bool:
        """Whether the mask is true at the rows of each place."""

        def is_one_hot(ids: Tensor, given: dict[Node, Tensor]) -> bool:
            found = known_value(mask, given, {})
            places = torch.arange(num).view(-1, *(1,) * len(order))
            return isinstance(found, Tensor) and torch.equal(found != 0, given[root].permute(order).long() == places)

        return is_settled(self.recorder, mask, root) and holds_for_samples(mask, root, num, is_one_hot, order)

    def roots_of(self, mask: Tensor, any_number: bool = False) -> list[Node]:
        """Integers from which the mask is computed, and that are the places of rows if these are known; with
        `any_number`, of several rows for each element of the mask."""
        found = self.candidates(self.recorder.node_of(mask), 0 if any_number else mask.numel())
        return found if self.root is None else [one for one in found if computes_same(one, self.root, self.same)]

    def finds_place(self, mask: Tensor, root: Node, number: int, num: int) -> bool:
        """Whether the mask is true at the rows of this one of `num` places. If so, rows have the places of `root`."""
        node, value = self.recorder.node_of(mask), root.meta["val"]
        orders = itertools.permutations(range(mask.ndim)) if value.ndim == mask.ndim else [(_FLAT,)]
        for order in orders if value.numel() == mask.numel() and (mask.ndim in (1, value.ndim)) else ():
            fits = order == (_FLAT,) or [value.shape[d] for d in order] == list(mask.shape)
            if fits and self._is_place(node, root, order, number, num):
                found = self.recorder.tensor_of(root)
                if found is not None:
                    self.root, self.order = root, order
                    self.ids = found.reshape(-1) if self.ids is None else self.ids
                return found is not None
        return False

    def _is_place(self, mask: Node, root: Node, order: tuple[int, ...], number: int, num: int) -> bool:
        def is_place(ids: Tensor, given: dict[Node, Tensor]) -> bool:
            found = known_value(mask, given, {})
            return isinstance(found, Tensor) and torch.equal(found != 0, _in_order(given[root], order).long() == number)

        return is_settled(self.recorder, mask, root) and holds_for_samples(mask, root, num, is_place, order, number)

    def has_place(self, mask: Tensor, root: Node, number: int, num: int) -> bool:
        """Whether the mask is that of one place, of rows or of the tokens that have several rows."""
        if root.meta["val"].numel() == mask.numel():
            return self.finds_place(mask, root, number, num)
        return self.finds_tokens(mask, root, number, num)

    def finds_tokens(self, mask: Tensor, root: Node, number: int, num: int) -> bool:
        """Whether the mask is true where one of several rows has this one of `num` places, and none has it twice. If
        so, rows have the places of `root`."""
        node, value, found = self.recorder.node_of(mask), root.meta["val"], self.recorder.tensor_of(root)
        if found is None or tuple(value.shape[:-1]) != tuple(mask.shape):
            return False

        def has_place(ids: Tensor, given: dict[Node, Tensor]) -> bool:
            selected = known_value(node, given, {})
            return isinstance(selected, Tensor) and torch.equal(selected != 0, (given[root].long() == number).any(-1))

        if not is_settled(self.recorder, node, root) or not holds_for_samples(node, root, num, has_place, number):
            return False
        before = self.root, self.order
        self.root, self.order = root, tuple(range(mask.ndim))
        if mask.ndim != 1 or not self.is_once_along(0):
            self.root, self.order = before
            return False
        self.ids = found.reshape(-1) if self.ids is None else self.ids
        return True

    def _goes_to_all(self) -> bool:
        """Whether the loop goes to every place that has a row."""
        assert self.root is not None
        node, num = self.recorder.node_of(self.places.keep), len(self.places.keep)

        def goes_to_all(ids: Tensor, given: dict[Node, Tensor]) -> bool:
            found = known_value(node, given, {})
            return isinstance(found, Tensor) and bool(found[ids].all())

        return is_settled(self.recorder, node, self.root) and holds_for_samples(node, self.root, num, goes_to_all)

    def is_once_along(self, dim: int) -> bool:
        """Whether rows with one index in this dim certainly have different places, as those of a topk have."""
        assert self.root is not None
        if dim == _FLAT:
            return True
        node, shape = self.root, self.root.meta["val"].shape
        other = [d for d in range(len(shape)) if d != dim and shape[d] > 1]
        while (source := same_order(node)) is not None and source.meta["val"].shape[-1] == shape[-1]:
            node = source
        if not other:
            return True
        given, output = (node.args[0], node.args[1]) if is_item(node) else (node, 0)
        if other != [len(shape) - 1] or not isinstance(given, Node) or op_spec_of(given).picks != output:
            return False
        (dims,) = (i for i, each in enumerate(given.target._schema.arguments) if each.name == "dim")  # type: ignore[union-attr]
        along = given.args[dims] if dims < len(given.args) else given.kwargs.get("dim", -1)
        return tensor_inputs(given)[0].meta["val"].ndim == len(shape) and along in (-1, len(shape) - 1)

    def positions(self) -> list[Tensor]:
        """The indices of all rows in a mask of one place, in the order of ids."""
        assert self.ids is not None and self.root is not None
        shape = tuple(self.root.meta["val"].shape)
        place = torch.arange(len(self.ids), device=self.ids.device)
        return [place if d == _FLAT else place // math.prod(shape[d + 1 :]) % shape[d] for d in self.order]


class ExpertRound:
    """One round of a loop: the rows whose places have these answers to whether they are a certain number.

    With `number`, Python knows the number of the place. Without `adds` it is a round without rows.
    """

    def __init__(self, loop: ExpertLoop, answers: dict[int, bool], number: int | None, adds: bool) -> None:
        self.loop = loop
        self.answers = answers
        self.number = number
        self._num_additions = 0
        self.is_over = False
        self._adds = adds
        self.keep: Tensor | None = None
        self.every = False  # whether all rows are in this round
        self.mask: Node | None = None  # of the rows of its place, if Python goes to all places
        recorder = loop.recorder
        self._nodes = dict(recorder.nodes)
        self._last = last_call(recorder)
        self.own: set[Node] = set()  # calls that add rows to a value
        self.added: set[Node] = set()  # such values, before and after
        self._results: list[Tensor] = []

    @property
    def ids(self) -> Tensor | None:
        return self.loop.ids

    @property
    def owner(self) -> Owner:
        return self.loop.places.owner

    def node_of(self, tensor: Tensor) -> Node:
        return self.loop.recorder.node_of(tensor)

    @property
    def has_rows(self) -> Condition | None:
        """What says whether there are rows of its place; None for a round of several places."""
        return None if self.number is None else Condition(self.loop, self.number, True)

    def is_place(self, number: int) -> bool:
        """Whether the place is the number. The rows for which the answer is the other one get a round of their own."""
        if self.number is not None:
            return number == self.number
        if number not in self.answers:
            if True in self.answers.values() or self.loop.is_beyond(number):
                return False
            if self.keep is not None:
                raise dynamic()
            self.loop.waiting.append(({**self.answers, number: True}, None))
            self.answers[number] = False
        return self.answers[number]

    def known_number(self) -> int:
        """The number of the place, for Python."""
        if self.number is None:
            if self.answers:
                raise dynamic()
            self.number = 0
            if self._adds:
                self.loop.waiting = [({}, number) for number in range(1, len(self.loop.places.keep))]
        return self.number

    def table_of(self, tensor: Tensor) -> Tensor | OwnRow:
        """For a parameter of the expert that has this number, those of the experts of all rows."""
        if self.number is None:
            return tensor
        numbers = [number for number in range(len(self.loop.places.keep)) if not self.loop.is_beyond(number)]
        found = self.loop.modules.siblings(tensor, self.number, numbers)
        if found is None:
            return tensor
        key = tuple(map(id, found))
        if key not in self.loop.tables:
            self.loop.tables[key] = torch.stack(found)
        self.owner.note_table(self.loop.tables[key], self.number, self.loop.goes_to(self.number))
        return OwnRow(self.loop.tables[key], self)

    def place_in(self, index: object, length: int) -> Any:
        """An index beside those of rows, in a dim of this length. If it may be the number of the place, which Python
        knows, it is the place of each row."""
        may_be = type(index) is int and index == self.number and length == len(self.loop.places.keep)
        return self.ids if may_be else index

    def rows(self, mask: Tensor) -> tuple[ExpertRows, ...]:
        """The indices that torch.where gives of the mask of one place."""
        self.loop.find_rows(mask)
        return self.all_rows()

    def rows_of_known(self, mask: Tensor) -> tuple[ExpertRows, ...] | None:
        """The same for a mask that the number of the place was used for; None if it is the mask of no place."""
        loop, num = self.loop, len(self.loop.places.keep)
        if self.number is None:
            return None
        found = any(loop.finds_place(mask, root, self.number, num) for root in loop.roots_of(mask))
        return self.all_rows() if found else None

    def all_rows(self) -> tuple[ExpertRows, ...]:
        """The indices of the rows of this round."""
        loop = self.loop
        assert loop.ids is not None
        if self.keep is None:
            conditions = [
                loop.ids == number if same else loop.ids != number
                for number, same in self.answers.items()
                if not loop.is_beyond(number)
            ]
            if not loop._goes_to_all():
                conditions.append(loop.places.keep[loop.ids])
            self.every = not conditions
            self.keep = torch.ones_like(loop.ids, dtype=torch.bool)
            for condition in conditions:
                self.keep = self.keep & condition
        return tuple(ExpertRows(each, self, dim) for each, dim in zip(loop.positions(), loop.order, strict=True))

    def are_all(self, rows: ExpertRows) -> bool:
        """Whether indices are the numbers of all rows, each in the round of its place."""
        assert self.loop.root is not None
        own = rows.dim == _FLAT or (rows.dim == 0 and self.loop.root.meta["val"].ndim == 1)
        return own and self.every and rows.body is self

    def are_distinct(self, rows: ExpertRows) -> bool:
        """Whether indices that a mask gave are certainly distinct within each place."""
        return rows.dim is not None and self.loop.is_once_along(rows.dim)

    def adding(self, x: Tensor, index: Tensor, rows: Tensor, alpha: float | None, add: Callable[[], Tensor]) -> Tensor:
        """Add rows to a value that was there before the loop, or write them there, with `add`."""
        recorder, totals = self.loop.recorder, self.loop.totals
        number = totals.number_of(x)
        addition = number, self.node_of(index), self.node_of(rows), alpha
        if not self._adds:
            self._check_same(addition)
            self.loop.last_addition = last_call(recorder)
            self.owner.note_addition(Addition((), x, x, recorder.node_of(x), self.mask, self))
            return x
        if not self.loop.additions:
            self.loop.first_addition = last_call(recorder)
        self.loop.additions.append(addition)
        last, before = last_call(recorder), recorder.node_of(x)
        found = add()
        self.own |= set(calls_since(recorder, last))
        self.added |= {before, recorder.node_of(found), recorder.node_of(x)}
        self._results += [x, found]
        totals.become(number, found)
        self.owner.note_addition(Addition(calls_since(recorder, last), x, found, before, self.mask, self))
        return found

    def _check_same(self, addition: tuple[int, Node, Node, float | None]) -> None:
        """Raise unless the first round added the same, for this place too."""
        number, *nodes, alpha = addition
        first = self.loop.additions[self._num_additions : self._num_additions + 1]
        self._num_additions += 1
        if self.number is not None and not any(
            (number, alpha) == (total, factor)
            and all(computes_same(one, two, self.loop.same) for one, two in zip(nodes, both, strict=True))
            for total, *both, factor in first
        ):
            raise dynamic()

    def reading(self, read: Callable[[], Tensor]) -> tuple[Tensor, list[Node]]:
        """A value, and the calls that compute it."""
        last = last_call(self.loop.recorder)
        found = read()
        return found, calls_since(self.loop.recorder, last)

    def forgive(self, nodes: Sequence[Node]) -> None:
        """Let these calls read a value to which rows are added: nothing else is computed from them."""
        self.own |= set(nodes)

    def end(self) -> None:
        """Raise if the round added less than the first, or more."""
        self.is_over = True
        if self.number and self._num_additions != len(self.loop.additions):
            raise dynamic()

    def check(self, frame: FrameType, state: LoopState) -> None:
        """End the round. Raise unless it only added rows to values, and would have been the same in any order."""
        self.end()
        recorder = self.loop.recorder
        after = {recorder.nodes[id(one)] for one in self._results}
        if any(
            recorder.nodes[key] is not node and recorder.nodes[key] not in after for key, node in self._nodes.items()
        ):
            raise dynamic()
        for node in calls_since(recorder, self._last):
            is_random = node.target is draw or op_spec_of(node).random is not None
            if (
                is_random
                or writes_in_place(node)
                or (node not in self.own and not self.added.isdisjoint(node.all_input_nodes))
            ):
                raise dynamic()
        now = dict(frame.f_locals)
        for name, value in state.locals.items():
            if name in now and not self._may_become(value, now[name]):
                raise dynamic()
        made = now.keys() - state.locals.keys()
        if any(self.loop.totals.was_one(now[name]) for name in made):
            raise dynamic()
        if not all(self._may_become(old, new) for old, new in state.changes()):
            raise dynamic()
        if self.number is None:
            return
        if any(not self._may_become(None, now[name]) for name in made & read_behind(frame)):
            raise dynamic()

    def _may_become(self, old: object, new: object) -> bool:
        if new is old or isinstance(new, (ExpertRows, OwnRow, LoopIndex, UnknownCount, Answer)):
            return True
        if isinstance(new, Tensor):
            return self.loop.totals.is_one(new)
        if isinstance(new, (tuple, list)):  # pieces of rows
            return all(isinstance(one, (ExpertRows, OwnRow)) for one in new)
        return type(new) is type(old) and isinstance(new, (int, float, str)) and new == old


def _in_order(value: Tensor, order: Sequence[int]) -> Tensor:
    """The value with the dims of a mask, as `order` says."""
    return value.reshape(-1) if tuple(order) == (_FLAT,) else value.permute(tuple(order))


def _is_fractional(value: Tensor) -> bool:
    return value.dtype.is_floating_point or value.dtype.is_complex or value.dtype == torch.bool
