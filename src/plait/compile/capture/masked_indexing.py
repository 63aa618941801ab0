"""Rows that a boolean mask selects, in a graph of fixed shapes: `logits[mask]`, `torch.where(mask)`, `mask.nonzero()`.

How many rows a mask selects is known only when the step runs, but there are never more than all rows. A selection
therefore keeps all rows, and which of them count. An op that works on each row by itself works on all rows; a sum, mean
or loss over rows leaves out those that do not count. These hold a harmless constant, so that what is computed from them
is finite and has no gradient. What needs the number of rows as a shape raises torch's own error.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Node
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

import plait.compile.capture.masked_ops  # noqa: F401  (fills the table of what selections do)
from plait.compile.capture.branches import part_behind_length, part_left_out
from plait.compile.capture.capture_errors import source_line, users_frame
from plait.compile.capture.empty_rounds import EmptyRounds
from plait.compile.capture.expert_loops import ExpertLoop
from plait.compile.capture.expert_modules import ExpertModules
from plait.compile.capture.expert_stand_ins import ExpertRows, LoopIndex
from plait.compile.capture.graph_recorder import GraphRecorder
from plait.compile.capture.late_values import LateCheck, LateValues
from plait.compile.capture.loop_state import calls_since, last_call
from plait.compile.capture.masked_rows import FILL, Addition, InOne, Selected, dynamic, is_whole, rows_of
from plait.compile.capture.parts_left_out import ConditionalUses
from plait.compile.capture.unrolled_loops import UnrolledLoop
from plait.compile.ir.rewriting import root_of
from plait.compile.ir.samples import bound_of, computes_same
from plait.errors import CaptureError

_MOST_STEPS = 64  # from what rows are combined with to numbers that are computed from several rows
_MOST_KNOWN = 1 << 16  # elements of a mask whose places become a constant


class Selections(TorchFunctionMode):
    """While entered, indexing with a mask whose values are not known yet returns a `Selected`.

    With `merges`, the rounds of a loop over all experts become one (unrolled_loops.py); `unrolled` has these loops.

    `recorder` writes the graph of a step of the model that `modules` are of.
    """

    def __init__(self, late: LateValues, recorder: GraphRecorder, modules: ExpertModules, merges: bool = True) -> None:
        super().__init__()
        self.merges = merges
        self.unrolled: list[UnrolledLoop] = []
        self._loop_now: UnrolledLoop | None = None  # which is finished
        self.has_finished = False
        self.late = late
        self._recorder = recorder
        self._modules = modules
        self._loop: ExpertLoop | None = None  # the last loop over places
        self._left: list[ExpertLoop] = []  # loops that ended before their last place
        self._masks: list[tuple[Node, Tensor]] = []
        self.left_out = ConditionalUses(recorder)
        late.parts = self.empty = EmptyRounds(recorder, late.checks, self.left_out)
        self._reduced: set[Node] = set()  # values that are computed from several rows

    def mask(self, keep: Tensor) -> Tensor:
        """The mask, or an earlier one that is computed in the same way, so that both select the same rows."""
        keep = keep.reshape(-1)
        node = self._recorder.node_of(keep)
        root = root_of(node)
        for earlier, found in self._masks:
            if computes_same(earlier, root):
                return found
        self._masks.append((root, keep))
        return keep

    def each(self, places: Selected) -> Iterator[Any]:
        """The experts that a mask selects, all at once: see expert_loops.py."""
        if not places.positions:
            raise dynamic()
        self._loop = loop = ExpertLoop(places, self._recorder, self._modules)
        return loop.run(sys._getframe(2), self._left)

    def adding(self, x: Tensor, keep: Tensor, add: Callable[[], object]) -> Any:
        """Add rows that a mask selects to a value, with `add`, which returns the value or None."""
        last, was = last_call(self._recorder), self._recorder.node_of(x)
        found = add()
        after = found if is_whole(found) else x
        self.note_addition(Addition(calls_since(self._recorder, last), x, after, was, self._recorder.node_of(keep)))
        return found

    def note_addition(self, addition: Addition) -> None:
        """Note that rows were added to a value."""
        self.empty.note_addition(addition)

    def reduced(self, found: Tensor) -> Tensor:
        """Note that `found` is computed from several rows, and so may be NaN if there are none. Returns it."""
        self.empty.note_reduction()
        self._reduced.add(self._recorder.node_of(found))
        return found

    def beside(self, x: Tensor, rows: Selected) -> Tensor:
        """The tensor `x`, with which rows are combined, without NaN if none of the rows counts.

        The mean of no rows is NaN, and a gradient of zero times NaN would still be NaN."""
        node = self._recorder.nodes.get(id(x))
        if node is None or not self._reduced or self._reduced.isdisjoint(_sources(node)):
            return x
        return torch.where(rows.count > 0, x, torch.full((), FILL, dtype=x.dtype, device=x.device))

    def note_table(self, table: Tensor, number: int, conditions: Sequence[Any]) -> None:
        """Note that the parameter of one expert was used, on conditions, for which a stack of those of all is taken."""
        self.left_out.note_table(table, number, [*conditions, *self.empty.conditions])

    def has_rows(self, asks: Any, expected: bool) -> bool:
        """The answer for Python to whether a round has rows: `expected`, the answer if it has some."""
        frame = users_frame(sys._getframe(1))
        part = None if frame is None else part_left_out(frame)
        if frame is None or part is None or part.runs is not expected:
            raise dynamic()
        self.empty.begin(frame, part, dynamic(), owner=asks)
        return expected

    def has_length(self, asks: Any) -> int:
        """The answer for Python to how many rows a round has, where only 0 or more matters."""
        frame = users_frame(sys._getframe(1))
        part = None if frame is None else part_behind_length(frame)
        if frame is None or part is None or not part.runs:
            raise dynamic()
        self.empty.begin(frame, part, dynamic(), owner=asks)
        return 1

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.empty.notice()
        if self._left and sys.exc_info()[1] is None:
            raise dynamic()
        if func in _BY_INDEX and (places := self._with_known_masks(*args[1:])) is not args[1]:
            found = func(args[0], places, *args[2:])
        elif func in _SCATTERED and not kwargs:
            found = self._scattered(func is Tensor.masked_scatter_, *args)
        elif func is Tensor.__getitem__:
            found = self._item(*args)
        elif func is Tensor.__setitem__:
            found = self._set_item(*args)
        elif func in (torch.masked_select, Tensor.masked_select) and not kwargs and args[0].shape == args[1].shape:
            found = self._item(*args)
        elif func in _NONZERO and _is_fake(args[0]) and not kwargs.keys() - {"as_tuple"}:
            found = self._nonzero(args[0], (args[1:] or (kwargs.get("as_tuple", False),))[0])
        elif func in _BINCOUNT and _is_fake(args[0]):
            found = self._counted(*args, **kwargs)
        elif func is torch.where and len(args) == 1 and not kwargs and _is_fake(args[0]):
            found = self._nonzero(args[0], True)
        else:
            return func(*args, **kwargs)
        return func(*args, **kwargs) if found is NotImplemented else found

    def _scattered(self, in_place: bool, x: Any, mask: Any, source: Any) -> Any:
        """x.masked_scatter(mask, source), where the values of the mask are known now."""
        alike = is_whole(source) and tuple(mask.shape) == tuple(x.shape)
        known = self._known_places(mask, of_buffers=False) if alike else None
        if known is None:
            return NotImplemented
        found = x if in_place else x.clone()
        found[known] = source.reshape(-1)[: len(known[0])]
        return found

    def _with_known_masks(self, index: object, value: object = None) -> Any:
        """An index with the places that masks select in place of masks whose values are known now. The index itself if
        there are none, or if the rows that the first one selects are no tensor of another shape."""
        each = index if isinstance(index, tuple) else (index,)
        whole = is_whole(value) and value.ndim > 0
        places = [self._known_places(one) if at or whole else None for at, one in enumerate(each)]
        if all(one is None for one in places):
            return index
        pairs = zip(each, places, strict=True)
        return tuple(value for one, known in pairs for value in ((one,) if known is None else known))

    def _known_places(self, mask: object, of_buffers: bool = True) -> tuple[Tensor, ...] | None:
        """The places that a mask selects, a tensor for each dim, if it is computed from constants, buffers and tensors
        that are neither parameters nor the batch's. With others of the last a later step is captured anew, and that
        buffers have these values is checked when the step runs."""
        if not is_whole(mask) or mask.dtype != torch.bool or not mask.ndim:
            return None
        fake = mask if _is_fake(mask) else self._recorder.outside.fake_of(mask)  # type: ignore[union-attr]
        if mask.numel() > _MOST_KNOWN:
            return None
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            constant = self._recorder.known_value(fake)
            known = self._recorder.known_value(fake, True) if constant is None and of_buffers else constant
            if known is None:
                return None
            places, values = [each.tolist() for each in known.nonzero(as_tuple=True)], known.tolist()
        if constant is None:
            frame = users_frame(sys._getframe(1))
            place = "" if frame is None else source_line(frame)
            same = fake == torch.tensor(values, device=fake.device)
            self.late.checks.append(LateCheck(same.all(), True, place))
        return tuple(torch.tensor(each, dtype=torch.int64, device=fake.device) for each in places)

    def _item(self, x: Any, index: Any) -> Any:
        if isinstance(x, Selected):
            return NotImplemented
        first, rest = (index[0], index[1:]) if isinstance(index, tuple) and index else (index, ())
        if _is_mask(first) and first.ndim and tuple(first.shape) == tuple(x.shape[: first.ndim]):
            if self.merges and (found := self._unrolled_rows(first, first.ndim == 1)) is not None:
                others = zip(rest, x.shape[first.ndim :], strict=False)
                places = [found[0].body.place_in(one, length) for one, length in others]
                return found[0].read(x, (*found, *places))
            chosen = Selected.of(x.flatten(0, first.ndim - 1), first, self)
            return chosen[(slice(None), *rest)] if rest else chosen  # type: ignore[index]
        each = index if isinstance(index, tuple) else (index,)
        if len(each) == 1 and isinstance(each[0], LoopIndex):
            return each[0].of(x)
        if not any(isinstance(i, Selected) for i in each):
            return NotImplemented
        if each[0] is None and isinstance(each[1], Selected):
            return InOne(self._item(x, each[1:]))
        if not isinstance(each[0], Selected):  # rows are the first dim
            raise dynamic()
        if isinstance(each[0], ExpertRows):
            return each[0].read(x, each)
        if len(each) == 1 and first.positions and first.ndim == 1 and x.shape[0] == len(first.values):
            return first.like(first.filled(x))
        if first.values.dtype == torch.bool:
            raise dynamic()
        return rows_of(each, lambda *values: x[tuple(values)])

    def _set_item(self, x: Any, index: Any, value: object) -> Any:
        if isinstance(value, ExpertRows):
            rows = self._unrolled_rows(index) if _is_mask(index) else None
            return value.write(x, index if rows is None else rows if value.source is None else value.source[1])
        if not isinstance(value, Selected):
            return NotImplemented
        mask = index.keep if isinstance(index, Selected) and index.positions else index
        if not _is_mask(mask) or tuple(mask.shape) != tuple(x.shape[: mask.ndim]) or self.mask(mask) is not value.keep:
            raise dynamic()
        wide = mask.reshape(mask.shape + (1,) * (x.ndim - mask.ndim))
        values = value.values.to(x.dtype).reshape(mask.shape + value.values.shape[1:])
        self.adding(x, value.keep, lambda: x.copy_(torch.where(wide, values, x)))
        return None

    def _counted(self, x: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Any:
        """bincount of numbers that are certainly below minlength, which therefore is the length of the result."""
        bound = bound_of(self._recorder.node_of(x))
        if weights is not None or x.ndim != 1 or bound is None or bound > minlength:
            return NotImplemented
        ones = torch.ones_like(x, dtype=torch.int64)
        return torch.zeros(minlength, dtype=torch.int64, device=x.device).scatter_add(0, x.long(), ones)

    def _rows_of_one(self, mask: Tensor) -> tuple[ExpertRows, ...] | None:
        """The rows of one expert of a loop over all of them; None if the mask is none of such a loop."""
        if mask.ndim < 2:
            return None
        if self._loop is not None and self._loop.body is not None:
            return self._loop.body.rows_of_known(mask)
        return self._unrolled_rows(mask)

    def _unrolled_rows(self, mask: Tensor, begins: bool = True) -> tuple[ExpertRows, ...] | None:
        """The rows of one expert of a loop over all of them, whose rounds Python runs. With `begins` the mask may begin
        a round."""
        if self._loop is not None and self._loop.body is not None:
            return None
        for loop in self.unrolled[-1:]:
            if (rows := loop.rows_of(mask) if begins else loop.rows_now(mask)) is not None:
                return rows
        if not begins:
            return None
        made = UnrolledLoop.of(mask, self, self._recorder, self._modules)
        if made is None:
            return None
        frame = users_frame(sys._getframe(1))
        made.line = "" if frame is None else source_line(frame)
        self.unrolled.append(made)
        return made.rows_of(mask)

    @property
    def in_expert_loop(self) -> bool:
        """Whether a loop over experts runs."""
        one_by_one = any(not loop.is_complete for loop in self.unrolled[-1:])
        return one_by_one or (self._loop is not None and self._loop.body is not None)

    def finish(self) -> None:
        """Raise for a loop over experts whose rounds cannot be one."""
        self.empty.notice()
        self.has_finished = True
        for loop in self.unrolled:
            self._loop_now = loop
            loop.finish()

    def loop_and_line(self, error: CaptureError) -> str:
        """The line with which the loop began that stopped a capture, and the line of it that did; empty if none did."""
        if not self.unrolled:
            return ""
        loop = self._loop_now or self.unrolled[-1]
        at = f", at {error.file}:{error.line}" if error.line else ""
        return f"{loop.line}{at}"

    def _nonzero(self, x: Tensor, as_tuple: bool) -> Any:
        if x.ndim == 0:
            return NotImplemented
        if as_tuple and self.merges and (rows := self._rows_of_one(x)) is not None:
            return rows
        if x.ndim == 1 and self.merges and x.dtype == torch.bool and (rows := self._unrolled_rows(x)) is not None:
            return rows if as_tuple else rows[0].unsqueeze(1)
        mask = x if x.dtype == torch.bool else x != 0
        places = torch.unravel_index(torch.arange(x.numel(), device=x.device), tuple(x.shape))
        found = [Selected(p, self.mask(mask), self, x.ndim == 1) for p in places]
        if as_tuple:
            return tuple(found)
        return Selected(torch.stack([one.values for one in found], 1), found[0].keep, self, x.ndim == 1)


def _sources(node: Node) -> list[Node]:
    """The values that a node is computed from, the nearest."""
    seen, queue = {node}, [node]
    for one in queue:
        for source in one.all_input_nodes:
            if source not in seen and len(seen) < _MOST_STEPS:
                seen.add(source)
                queue.append(source)
    return queue


def _is_fake(value: object) -> bool:
    return isinstance(value, FakeTensor)


def _is_mask(value: Any) -> bool:
    return _is_fake(value) and value.dtype == torch.bool


_BY_INDEX = frozenset({Tensor.__getitem__, Tensor.__setitem__})
_SCATTERED = frozenset({torch.masked_scatter, Tensor.masked_scatter, Tensor.masked_scatter_})
_BINCOUNT = frozenset({torch.bincount, Tensor.bincount})
_NONZERO = frozenset({torch.nonzero, Tensor.nonzero, torch.argwhere, Tensor.argwhere})
