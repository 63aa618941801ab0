"""A loop over the experts that are hit, in a graph of fixed shapes: its body runs once, for all experts together.

    mask = one_hot(ids, num_experts).permute(2, 1, 0)
    for expert in (mask.sum((-1, -2)) > 0).nonzero():
        place, token = torch.where(mask[expert[0]])
        out.index_add_(0, token, linear(hidden[token], weight[expert[0]]) * scores[token, place, None])

Each row, a token with one of its experts, is in one round of the loop. If rounds do nothing but add their rows to what
was there before the loop, all rows can be in one: `expert` is then the expert of each row, torch.where gives all rows,
and products with weight[expert] are those of compile/ops/experts.py. What else the body does raises torch's own error
for numbers that are not known. That a mask says which expert each row has is worked out for samples of these.
"""

from __future__ import annotations

import dis
import itertools
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_aggregate
from torch.utils._python_dispatch import _disable_current_modes

from plait.compile.capture.graph_recorder import GraphRecorder
from plait.compile.capture.masked_ops import give_operators
from plait.compile.capture.masked_rows import HANDLERS, Selected, UnknownCount, dynamic, same_rows
from plait.compile.ir.calls import is_item, is_tensor, op_spec_of, tensor_inputs
from plait.compile.ir.samples import known_value, sample_ids, whole_numbers
from plait.compile.ops.draw import draw
from plait.compile.ops.experts import expert_mm, expert_rows

_MOST_STEPS = 64  # from the experts of rows to a mask


class ExpertLoop:
    """A loop over the places that a mask selects, for which all rows of all places are one round.

    Python may ask whether the place is a certain number: the rows of that place then are in a round of their own.
    """

    def __init__(self, places: Selected, recorder: GraphRecorder) -> None:
        self.places = places
        self.recorder = recorder
        self.ids: Tensor | None = None  # [S], the place of each row
        self._root: Node | None = None  # what ids are computed from
        self._order: tuple[int, ...] = ()  # the dims of a mask behind the first, as dims of the root
        self.waiting: list[dict[int, bool]] = []

    def run(self, frame: FrameType, left: list[ExpertLoop]) -> Iterator[Place]:
        """The rounds. `frame` runs the loop; a loop that it leaves early is added to `left`."""
        if dis.opname[frame.f_code.co_code[frame.f_lasti]] != "GET_ITER":  # such as of enumerate, which counts rounds
            raise dynamic()
        return self._rounds(left)

    def _rounds(self, left: list[ExpertLoop]) -> Iterator[Place]:
        self.waiting = [{}]
        while self.waiting:
            answers = self.waiting.pop(0)
            if any(same and self._is_beyond(number) for number, same in answers.items()):
                continue
            body = _Round(self, answers, sys._getframe(1))
            try:
                yield Place(body, self.places.ndim - 1)
            except GeneratorExit:
                left.append(self)
                raise
            body.check(sys._getframe(1))

    def _is_beyond(self, number: int) -> bool:
        """Whether no row can have this place, as ids are from a sort or topk of fewer."""
        return self._root is not None and (bound := _bound(self._root)) is not None and not 0 <= number < bound

    def find_rows(self, mask: Tensor) -> None:
        """Find the place of each row from a mask of [places, ...], true at the rows of each place."""
        if mask.ndim < 2:
            raise dynamic()
        node, shape = self.recorder.node_of(mask), mask.shape[1:]
        for root in self._candidates(node, math.prod(shape)):
            value = root.meta["val"]
            for order in itertools.permutations(range(len(shape))) if value.ndim == len(shape) else ():
                if [value.shape[d] for d in order] == list(shape) and self._says(node, root, order, mask.shape[0]):
                    found = self.recorder.tensor_of(root)
                    if found is None or self._root not in (None, root) or self.recorder.mutating:
                        raise dynamic()
                    self._root, self._order = root, order
                    self.ids = found.reshape(-1) if self.ids is None else self.ids
                    return
        raise dynamic()

    def _candidates(self, mask: Node, num_rows: int) -> list[Node]:
        """Integers, one for each row, from which the mask is computed; the nearest first."""
        found: list[Node] = []
        seen, queue = {mask}, [mask]
        for node in queue:
            value = node.meta["val"]
            if node is not mask and is_tensor(node) and value.numel() == num_rows and not _is_fractional(value):
                found.append(whole_numbers(node))
            for source in node.all_input_nodes:
                if source not in seen and len(seen) < _MOST_STEPS:
                    seen.add(source)
                    queue.append(source)
        return list(dict.fromkeys(found))

    def _says(self, mask: Node, root: Node, order: tuple[int, ...], num: int) -> bool:
        """Whether the mask is true at the rows of each place, worked out for several ids."""

        def agrees(ids: Tensor, given: Tensor) -> bool:
            found = known_value(mask, {root: given}, {})
            places = torch.arange(num).view(-1, *(1,) * len(order))
            return isinstance(found, Tensor) and torch.equal(found != 0, given.permute(order).long() == places)

        return _for_samples(root, num, agrees)

    def _goes_to_all(self) -> bool:
        """Whether the loop goes to every place that has a row."""
        assert self._root is not None
        root, node = self._root, self.recorder.node_of(self.places.keep)

        def agrees(ids: Tensor, given: Tensor) -> bool:
            found = known_value(node, {root: given}, {})
            return isinstance(found, Tensor) and bool(found[ids].all())

        return _for_samples(root, len(self.places.keep), agrees)

    def positions(self) -> list[Tensor]:
        """The indices of all rows in a mask of one place, in the order of ids."""
        assert self.ids is not None and self._root is not None
        shape = tuple(self._root.meta["val"].shape)
        place = torch.arange(len(self.ids), device=self.ids.device)
        return [place // math.prod(shape[d + 1 :]) % shape[d] for d in self._order]


class _Round:
    """One round of a loop: the rows whose places have these answers to whether they are a certain number."""

    def __init__(self, loop: ExpertLoop, answers: dict[int, bool], frame: FrameType) -> None:
        self.loop = loop
        self.answers = answers
        self.keep: Tensor | None = None
        self.every = False  # whether all rows are in this round
        recorder = loop.recorder
        self._nodes = dict(recorder.nodes)
        self._mutating = recorder.mutating
        self._last = _last(recorder)
        self._own: set[Node] = set()  # calls that add rows to a value
        self._added: set[Node] = set()  # such values, before and after
        self._results: list[Tensor] = []
        self._locals = dict(frame.f_locals)
        self._sizes = {name: len(v) for name, v in self._locals.items() if isinstance(v, (list, dict, set))}

    def is_place(self, number: int) -> bool:
        """Whether the place is the number. The rows for which the answer is the other one get a round of their own."""
        if number not in self.answers:
            if self.keep is not None or True in self.answers.values():
                if True in self.answers.values():
                    return False
                raise dynamic()
            self.loop.waiting.append({**self.answers, number: True})
            self.answers[number] = False
        return self.answers[number]

    def rows(self, mask: Tensor) -> tuple[ExpertRows, ...]:
        """The indices that torch.where gives of the mask of one place."""
        loop = self.loop
        loop.find_rows(mask)
        assert loop.ids is not None
        if self.keep is None:
            conditions = [
                loop.ids == number if same else loop.ids != number
                for number, same in self.answers.items()
                if not loop._is_beyond(number)
            ]
            if not loop._goes_to_all():
                conditions.append(loop.places.keep[loop.ids])
            self.every = not conditions
            self.keep = torch.ones_like(loop.ids, dtype=torch.bool)
            for condition in conditions:
                self.keep = self.keep & condition
        return tuple(ExpertRows(each, self) for each in loop.positions())

    def adding(self, x: Tensor, add: Callable[[], Tensor]) -> Tensor:
        """Add rows to a value that was there before the loop."""
        recorder = self.loop.recorder
        last, before = _last(recorder), recorder.node_of(x)
        found = add()
        self._own |= set(_since(recorder, last))
        self._added |= {before, recorder.node_of(found), recorder.node_of(x)}
        self._results += [x, found]
        return found

    def reading(self, read: Callable[[], Tensor]) -> tuple[Tensor, list[Node]]:
        """A value, and the calls that compute it."""
        last = _last(self.loop.recorder)
        found = read()
        return found, _since(self.loop.recorder, last)

    def forgive(self, nodes: Sequence[Node]) -> None:
        """Let these calls read a value to which rows are added: nothing else is computed from them."""
        self._own |= set(nodes)

    def check(self, frame: FrameType) -> None:
        """Raise unless the round only added rows to values, and would have been the same in any order."""
        recorder = self.loop.recorder
        if recorder.mutating and not self._mutating:
            raise dynamic()
        after = {recorder.nodes[id(one)] for one in self._results}
        if any(
            recorder.nodes[key] is not node and recorder.nodes[key] not in after for key, node in self._nodes.items()
        ):
            raise dynamic()
        for node in _since(recorder, self._last):
            is_random = node.target is draw or op_spec_of(node).random is not None
            if is_random or (node not in self._own and not self._added.isdisjoint(node.all_input_nodes)):
                raise dynamic()
        now = dict(frame.f_locals)
        for name, value in self._locals.items():
            if name in now and not self._may_become(value, now[name]):
                raise dynamic()
        if any(len(now[name]) != size for name, size in self._sizes.items() if now.get(name) is self._locals[name]):
            raise dynamic()

    def _may_become(self, old: Any, new: Any) -> bool:
        if new is old or isinstance(new, (ExpertRows, Own, Place, UnknownCount)):
            return True
        if isinstance(new, Tensor):
            return any(new is one for one in self._results)
        if isinstance(new, (tuple, list)):  # pieces of rows
            return all(isinstance(one, (ExpertRows, Own)) for one in new)
        return type(new) is type(old) and isinstance(new, (int, float, str)) and new == old


class Place:
    """The number of the place, which a loop over places gives to its body."""

    def __init__(self, body: _Round, ndim: int) -> None:
        self._body = body
        self._ndim = ndim

    def __getitem__(self, index: Any) -> Place:
        if self._ndim != 1 or index not in (0, -1):
            raise dynamic()
        return Place(self._body, 0)

    def squeeze(self, dim: int = 0) -> Place:
        return Place(self._body, 0)

    def of(self, x: Tensor) -> Own:
        """The row of a table of each place."""
        if self._ndim:
            raise dynamic()
        return Own(x, self._body)

    def __eq__(self, other: object) -> Any:
        return _Answer(self._body, other)

    def __ne__(self, other: object) -> Any:
        return _Answer(self._body, other, negated=True)

    __hash__ = object.__hash__

    def _unknown(self, *others: Any) -> Any:
        raise dynamic()

    __bool__ = __index__ = __int__ = __float__ = __len__ = __iter__ = item = tolist = _unknown
    __lt__ = __le__ = __gt__ = __ge__ = __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _unknown

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise dynamic()


class _Answer:
    """Whether the place is a certain number, for Python to ask."""

    def __init__(self, body: _Round, number: object, negated: bool = False) -> None:
        self._body, self._number, self._negated = body, number, negated

    def __bool__(self) -> bool:
        if type(self._number) is not int:
            raise dynamic()
        return self._body.is_place(self._number) is not self._negated

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise dynamic()


class Own:
    """table[place]: for each row, the row of a table for its own place. What is done with it is done with the table."""

    def __init__(self, table: Tensor, body: _Round) -> None:
        self.table = table
        self.body = body

    @property
    def shape(self) -> torch.Size:
        return self.table.shape[1:]

    @property
    def ndim(self) -> int:
        return self.table.ndim - 1

    def __getattr__(self, name: str) -> Any:
        if name in ("T", "mT"):
            return _transposed(self)
        if name in ("dtype", "device", "requires_grad", "is_cuda"):
            return getattr(self.table, name)
        method = None if name.startswith("__") else getattr(Tensor, name, None)
        if not callable(method):
            raise AttributeError(name)
        return lambda *args, **kwargs: Own.__torch_function__(method, (), (self, *args), kwargs)

    def _unknown(self, *others: Any) -> Any:
        raise dynamic()

    __bool__ = __len__ = __iter__ = _unknown

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _call(func, args, kwargs or {})


class ExpertRows(Selected):
    """Values of the rows of one round of a loop, which is all that is known of them together."""

    def __init__(self, values: Tensor, body: _Round) -> None:
        assert body.keep is not None
        super().__init__(values, body.keep, body.loop.places.owner)
        self.body = body
        self.source: tuple[Tensor, Any, list[Node]] | None = None  # the value and rows that were read
        self.more: ExpertRows | None = None  # what was added to them

    def like(self, values: Tensor) -> ExpertRows:
        return ExpertRows(values, self.body)

    def filled(self, values: Tensor, fill: float | None = None) -> Tensor:
        raise dynamic()

    @property
    def count(self) -> Tensor:
        raise dynamic()

    @property
    def shape(self) -> tuple[Any, ...]:
        return (UnknownCount(), *self.values.shape[1:])

    def terms(self) -> Tensor:
        """The values, with zeros in rows of other rounds."""
        return self.values if self.body.every else super().filled(self.values, 0)

    def read(self, x: Tensor, index: Sequence[Any]) -> ExpertRows:
        """x[index], where `index` begins with these rows."""
        if any(one.values.dtype == torch.bool for one in same_rows(index)):
            raise dynamic()
        places = tuple(one.values if isinstance(one, Selected) else one for one in index)
        values, nodes = self.body.reading(lambda: x[places])
        found = self.like(values)
        found.source = x, index, nodes
        return found

    def write(self, x: Tensor, index: Any) -> None:
        """x[index] = these rows, which must be x[index] with others added."""
        each = index if isinstance(index, tuple) else (index,)
        if self.source is None or self.more is None or self.source[0] is not x or len(each) != 1:
            raise dynamic()
        if len(self.source[1]) != 1 or self.source[1][0] is not each[0]:
            raise dynamic()
        self.body.forgive([*self.source[2], self.body.loop.recorder.node_of(self.values)])
        more = self.more.terms().to(x.dtype).expand(len(each[0].values), *x.shape[1:])
        self.body.adding(x, lambda: x.index_add_(0, each[0].values, more))

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _call(func, args, kwargs or {})


give_operators(Own)


# ---- torch functions ----


def _call(func: Any, args: Any, kwargs: Any) -> Any:
    name = getattr(func, "__name__", "").strip("_")
    if name in _LOOKS:
        return _LOOKS[name](*args, **kwargs)
    first = args[0] if args else None
    if isinstance(first, Own) and not _rows_in(args, kwargs):
        if name not in _ON_TABLE:
            raise dynamic()
        return _ON_TABLE[name](func, first, *args[1:], **kwargs)
    if name in _PRODUCTS and any(isinstance(one, Own) for one in args):
        return _PRODUCTS[name](*args, **kwargs)
    if name == "index_add":
        return _index_add(func, *args, **kwargs)
    handler = HANDLERS.get(name)
    if handler is None:
        raise dynamic()
    ndim = max(one.ndim for one in _rows_in(args, kwargs))
    found = handler(func, *_with_rows(args, ndim), **_with_rows(kwargs, ndim))
    results = found if isinstance(found, (tuple, list)) else (found,)
    if any(not isinstance(one, (ExpertRows, int, UnknownCount)) for one in _flat(results)):
        raise dynamic()
    if name in ("add", "iadd", "radd") and len(args) == 2 and isinstance(found, ExpertRows):
        # x[rows] + more, which may be what is written to x[rows]
        for one, other in (args, args[::-1]):
            if isinstance(one, ExpertRows) and one.source is not None and isinstance(other, ExpertRows):
                found.source, found.more = one.source, other
    return found


def _flat(values: Any) -> list[Any]:
    return [each for value in values for each in (value if isinstance(value, (tuple, list)) else (value,))]


def _rows_in(*values: Any) -> list[ExpertRows]:
    found: list[ExpertRows] = []
    map_aggregate(values, lambda v: found.append(v) if isinstance(v, ExpertRows) else None)
    return found


def _with_rows(values: Any, ndim: int) -> Any:
    """The arguments, with the row of each row's place where there is a table."""
    return map_aggregate(values, lambda v: _looked_up(v, ndim) if isinstance(v, Own) else v)


def _looked_up(own: Own, ndim: int) -> ExpertRows:
    assert own.body.loop.ids is not None
    rows = expert_rows(own.table, own.body.loop.ids)
    return ExpertRows(rows.reshape(len(rows), *(1,) * (ndim - rows.ndim), *rows.shape[1:]), own.body)


def _where(condition: Any, *others: Any, **kwargs: Any) -> Any:
    """torch.where of the mask of a place."""
    if others or kwargs:
        return _call_handler(torch.where, "where", (condition, *others), kwargs)
    if not isinstance(condition, Own):
        raise dynamic()
    return condition.body.rows(condition.table)


def _nonzero(condition: Any, as_tuple: bool = False) -> Any:
    if not isinstance(condition, Own) or not as_tuple:
        raise dynamic()
    return condition.body.rows(condition.table)


def _call_handler(func: Any, name: str, args: Any, kwargs: Any) -> Any:
    rows = _rows_in(args, kwargs)
    if not rows:
        raise dynamic()
    ndim = max(one.ndim for one in rows)
    return HANDLERS[name](func, *_with_rows(args, ndim), **_with_rows(kwargs, ndim))


def _on_table(func: Any, own: Own, *args: Any, **kwargs: Any) -> Own:
    """What is done to each element by itself."""
    if any(isinstance(one, (Tensor, Own)) for one in (*args, *kwargs.values())):
        raise dynamic()
    return Own(func(own.table, *args, **kwargs), own.body)


def _transposed(own: Own, one: int = 0, two: int = 1) -> Own:
    return Own(own.table.transpose(one % own.ndim + 1, two % own.ndim + 1), own.body)


def _table_pieces(func: Any, own: Own, size: Any, dim: int = 0) -> tuple[Own, ...]:
    return tuple(Own(part, own.body) for part in func(own.table, size, dim % own.ndim + 1))


def _matmul(x: Any, weight: Any) -> ExpertRows:
    if not isinstance(x, ExpertRows) or not isinstance(weight, Own) or x.ndim != 2 or weight.ndim != 2:
        raise dynamic()
    ids = x.body.loop.ids
    if weight.body is not x.body or ids is None:
        raise dynamic()
    values, table = _as_autocast([x.values, weight.table])
    return x.like(expert_mm(values, table, ids))


def _linear(x: Any, weight: Any, bias: Any = None) -> ExpertRows:
    if not isinstance(weight, Own) or not isinstance(bias, (Own, Tensor, type(None))):
        raise dynamic()
    found = _matmul(x, _transposed(weight))
    if bias is None:
        return found
    if isinstance(bias, Own):
        (table,) = _as_autocast([bias.table])
        return found.like(found.values + _looked_up(Own(table, bias.body), 2).values)
    return found.like(found.values + _as_autocast([bias])[0])


def _as_autocast(tensors: list[Tensor]) -> list[Tensor]:
    """The operands of a product, cast as torch.autocast casts them."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return [t.to(dtype) if t.dtype.is_floating_point and t.dtype != torch.float64 else t for t in tensors]


def _index_add(func: Any, x: Any, dim: int, index: Any, source: Any, *, alpha: float = 1) -> Tensor:
    if not isinstance(x, Tensor) or dim != 0 or not isinstance(index, ExpertRows) or not isinstance(source, ExpertRows):
        raise dynamic()
    same_rows([index, source])
    return index.body.adding(x, lambda: func(x, 0, index.values, source.terms(), alpha=alpha))


_LOOKS = {"where": _where, "nonzero": _nonzero}
_ON_TABLE: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("to", "float", "double", "half", "bfloat16"), _on_table),
    **dict.fromkeys(("detach", "contiguous", "clone", "mul", "neg"), _on_table),
    **dict.fromkeys(("t", "transpose", "swapaxes"), lambda func, own, *dims: _transposed(own, *dims)),
    **dict.fromkeys(("chunk", "split"), _table_pieces),
}  # fmt: skip
_PRODUCTS = {"linear": _linear, "matmul": _matmul, "mm": _matmul}


# ---- nodes ----


def _last(recorder: GraphRecorder) -> Node:
    return next(reversed(recorder.graph.nodes))


def _since(recorder: GraphRecorder, last: Node) -> list[Node]:
    """The calls that were recorded after `last`."""
    found = []
    for node in reversed(recorder.graph.nodes):
        if node is last:
            break
        if node.op == "call_function":
            found.append(node)
    return found


def _is_fractional(value: Tensor) -> bool:
    return value.dtype.is_floating_point or value.dtype.is_complex or value.dtype == torch.bool


def _for_samples(root: Node, num: int, holds: Callable[[Tensor, Tensor], bool]) -> bool:
    """Whether something holds for samples of the places of rows, which it is given flat and as the root's value."""
    value = root.meta["val"]
    with torch._C.DisableTorchFunction(), _disable_current_modes(), torch.no_grad():
        samples = sample_ids(value.numel(), num)
        return all(holds(ids, ids.to(value.dtype).reshape(value.shape)) for ids in samples)


def _bound(node: Node) -> int | None:
    """A number that integers are certainly below, and not below zero; None if none is known."""
    node = whole_numbers(node)
    source, output = (node.args[0], node.args[1]) if is_item(node) else (node, 0)
    if not isinstance(source, Node) or op_spec_of(source).picks != output:
        return None
    (x,) = tensor_inputs(source)
    shape, out = x.meta["val"].shape, node.meta["val"].shape
    shorter = [n for n, m in zip(shape, out, strict=True) if n != m] if len(shape) == len(out) else []
    return max(shorter or shape)
