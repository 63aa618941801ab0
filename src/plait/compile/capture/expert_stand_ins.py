"""What stands for the rows of a loop over experts and for the tables that its body looks up: see expert_loops.py.

What the body computes from rows is computed for all of them, row by row. What it computes from table[expert] is
computed from the table; in a product with rows, each row takes the matrix of its own expert.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_aggregate

from plait.compile.capture.masked_ops import give_operators
from plait.compile.capture.masked_rows import (
    HANDLERS,
    Owner,
    Selected,
    TorchFunction,
    UnknownCount,
    dynamic,
    is_whole,
    same_rows,
)
from plait.compile.ops.experts import expert_addmm, expert_mm, expert_rows


class Round(Protocol):
    """The round of a loop to which rows belong.

    keep     one bool for each row: whether the row is in this round; None before any rows are asked for
    every    whether all rows are in this round
    is_over  whether the round has ended
    """

    keep: Tensor | None
    every: bool
    is_over: bool

    @property
    def ids(self) -> Tensor | None:
        """The place of each row."""

    @property
    def owner(self) -> Owner: ...

    def node_of(self, tensor: Tensor) -> Node: ...

    def is_place(self, number: int) -> bool:
        """Whether the place is the number."""

    def known_number(self) -> int:
        """The number of the place, for Python."""

    def rows(self, mask: Tensor) -> tuple[ExpertRows, ...]:
        """The indices that torch.where gives of the mask of one place."""

    def table_of(self, tensor: Tensor) -> Tensor | OwnRow:
        """For a parameter of the one expert that Python knows of, those of the experts of all rows."""

    def adding(self, x: Tensor, index: Tensor, rows: Tensor, alpha: float | None, add: Callable[[], Tensor]) -> Tensor:
        """Add rows to a value that was there before the loop, or write them there, with `add`."""

    def are_all(self, rows: ExpertRows) -> bool:
        """Whether indices are the numbers of all rows, each in the round of its place."""

    def are_distinct(self, rows: ExpertRows) -> bool:
        """Whether indices that a mask gave are certainly distinct within each place."""

    def reading(self, read: Callable[[], Tensor]) -> tuple[Tensor, list[Node]]:
        """A value, and the calls that compute it."""

    def place_in(self, index: object, length: int) -> Any:
        """An index beside those of rows, in a dim of this length. If it may be the number of the place, which Python
        knows, it is the place of each row."""

    def forgive(self, nodes: Sequence[Node]) -> None:
        """Let these calls read a value to which rows are added: nothing else is computed from them."""


class OwnRow:
    """table[place]: for each row, the row of a table for its own place. What is done with it is done with the table."""

    def __init__(self, table: Tensor, body: Round) -> None:
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
        return lambda *args, **kwargs: OwnRow.__torch_function__(method, (), (self, *args), kwargs)

    def _unknown(self, *others: object) -> NoReturn:
        raise dynamic()

    __bool__ = __len__ = __iter__ = _unknown

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _call(func, args, kwargs or {})


class ExpertRows(Selected):
    """Values of the rows of one round of a loop, which is all that is known of them together.

    With `dim` they are indices that a mask gave, in this dim of the experts of rows.
    """

    def __init__(self, values: Tensor, body: Round, dim: int | None = None) -> None:
        assert body.keep is not None
        super().__init__(values, body.keep, body.owner)
        self.body = body
        self.dim = dim
        self.source: tuple[Tensor, Any, list[Node]] | None = None  # the value and rows that were read
        self.more: ExpertRows | None = None  # what was added to them

    def like(self, values: Tensor) -> ExpertRows:
        return ExpertRows(values, self.body)

    def reshaped(self, values: Tensor) -> ExpertRows:
        return ExpertRows(values, self.body, self.dim if values.numel() == len(values) else None)

    def filled(self, values: Tensor, fill: float | None = None) -> Tensor:
        raise dynamic()

    def between(self, begin: int, end: int | None) -> ExpertRows:
        raise dynamic()

    @property
    def count(self) -> Tensor:
        raise dynamic()

    @property
    def shape(self) -> tuple[Any, ...]:
        return (UnknownCount(self.owner, self.body), *self.values.shape[1:])

    def __len__(self) -> int:
        return self.owner.has_length(self.body)

    def terms(self) -> Tensor:
        """The values, with zeros in rows of other rounds."""
        return self.values if self.body.every else super().filled(self.values, 0)

    def read(self, x: Tensor, index: Sequence[Any]) -> ExpertRows:
        """x[index], where `index` begins with these rows."""
        if self.body.is_over or any(one.values.dtype == torch.bool for one in same_rows(index)):
            raise dynamic()
        places = tuple(one.values if isinstance(one, Selected) else one for one in index)
        values, nodes = self.body.reading(lambda: x[places])
        found = self.like(values)
        found.source = x, index, nodes
        return found

    def write(self, x: Tensor, index: Any) -> None:
        """x[index] = these rows, which must be x[index] with others added, or each in a place of its own."""
        each = index if isinstance(index, tuple) else (index,)
        if self.more is None and isinstance(each[0], ExpertRows) and all(one == slice(None) for one in each[1:]):
            return self._write_all(x, each[0])
        if self.source is None or self.more is None or self.source[0] is not x or len(each) != 1:
            raise dynamic()
        if len(self.source[1]) != 1 or self.source[1][0] is not each[0]:
            raise dynamic()
        if self.body.is_over or not self.body.are_distinct(each[0]):  # of equal indices the last one would be left
            raise dynamic()
        self.body.forgive([*self.source[2], self.body.node_of(self.values)])
        more = self.more.terms().to(x.dtype).expand(len(each[0].values), *x.shape[1:])
        self.body.adding(x, each[0].values, more, 1, lambda: x.index_add_(0, each[0].values, more))

    def _write_all(self, x: Tensor, index: ExpertRows) -> None:
        """x[index] = these rows, of which the rounds together write each once, and so all of x."""
        same_rows([self, index])
        rows = self.values.to(x.dtype)
        if self.body.is_over or not self.body.are_all(index) or rows.shape != x.shape:
            raise dynamic()
        self.body.adding(x, index.values, rows, None, lambda: x.copy_(rows))

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _call(func, args, kwargs or {})


class LoopIndex:
    """The number of the place, which a loop over places gives to its body."""

    def __init__(self, body: Round, ndim: int) -> None:
        self._body = body
        self._ndim = ndim

    def __getitem__(self, index: object) -> LoopIndex:
        if self._ndim != 1 or index not in (0, -1):
            raise dynamic()
        return LoopIndex(self._body, 0)

    def squeeze(self, dim: int = 0) -> LoopIndex:
        return LoopIndex(self._body, 0)

    def of(self, x: Tensor) -> OwnRow:
        """The row of a table of each place."""
        return OwnRow(x.unsqueeze(1) if self._ndim else x, self._body)

    def __eq__(self, other: object) -> Any:
        return Answer(self._body, other)

    def __ne__(self, other: object) -> Any:
        return Answer(self._body, other, negated=True)

    __hash__ = object.__hash__

    def _unknown(self, *others: object) -> NoReturn:
        raise dynamic()

    def _number(self) -> int:
        return self._body.known_number()

    __index__ = __int__ = item = _number

    def __format__(self, spec: str) -> str:
        return format(self._body.known_number(), spec)

    __bool__ = __float__ = __len__ = __iter__ = tolist = _unknown
    __lt__ = __le__ = __gt__ = __ge__ = __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _unknown

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise dynamic()


class Answer:
    """Whether the place is a certain number, for Python to ask."""

    def __init__(self, body: Round, number: object, negated: bool = False) -> None:
        self._body, self._number, self._negated = body, number, negated

    def __bool__(self) -> bool:
        if type(self._number) is not int:
            raise dynamic()
        return self._body.is_place(self._number) is not self._negated

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise dynamic()


give_operators(OwnRow)


# ---- torch functions ----


def _call(func: TorchFunction, args: Any, kwargs: Any) -> Any:
    name = getattr(func, "__name__", "").strip("_")
    rows = _rows_in(args, kwargs)
    if any(one.body.is_over for one in rows):
        raise dynamic()
    if rows:
        args, kwargs = _with_tables((args, kwargs), rows[0].body)
    if name in _LOOKS:
        return _LOOKS[name](*args, **kwargs)
    first = args[0] if args else None
    if isinstance(first, OwnRow) and not _rows_in(args, kwargs):
        if name not in _ON_TABLE:
            raise dynamic()
        return _ON_TABLE[name](func, first, *args[1:], **kwargs)
    if name in _PRODUCTS and any(isinstance(one, OwnRow) for one in args):
        return _PRODUCTS[name](*args, **kwargs)
    if name == "index_add":
        return _index_add(func, *args, **kwargs)
    if name in _NORMS and any(isinstance(one, OwnRow) for one in (*args, *kwargs.values())):
        return _NORMS[name](func, *args, **kwargs)
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


def _with_tables(values: Any, body: Round) -> Any:
    """The arguments, with the table of all experts for a parameter of one."""

    def table_of(value: object) -> Any:
        return body.table_of(value) if is_whole(value) else value

    return map_aggregate(values, table_of)


def _with_rows(values: Any, ndim: int) -> Any:
    """The arguments, with the row of each row's place where there is a table."""
    return map_aggregate(values, lambda v: _looked_up(v, ndim) if isinstance(v, OwnRow) else v)


def _looked_up(own: OwnRow, ndim: int) -> ExpertRows:
    assert own.body.ids is not None
    rows = expert_rows(own.table, own.body.ids)
    return ExpertRows(rows.reshape(len(rows), *(1,) * (ndim - rows.ndim), *rows.shape[1:]), own.body)


def _where(condition: object, *others: object, **kwargs: Any) -> Any:
    """torch.where of the mask of a place."""
    if others or kwargs:
        return _call_handler(torch.where, "where", (condition, *others), kwargs)
    if not isinstance(condition, OwnRow):
        raise dynamic()
    return condition.body.rows(condition.table)


def _nonzero(condition: object, as_tuple: bool = False) -> Any:
    if not isinstance(condition, OwnRow) or not as_tuple:
        raise dynamic()
    return condition.body.rows(condition.table)


def _call_handler(func: TorchFunction, name: str, args: Any, kwargs: Any) -> Any:
    rows = _rows_in(args, kwargs)
    if not rows:
        raise dynamic()
    ndim = max(one.ndim for one in rows)
    return HANDLERS[name](func, *_with_rows(args, ndim), **_with_rows(kwargs, ndim))


def _on_table(func: TorchFunction, own: OwnRow, *args: Any, **kwargs: Any) -> OwnRow:
    """What is done to each element by itself."""
    if any(isinstance(one, (Tensor, OwnRow)) for one in (*args, *kwargs.values())):
        raise dynamic()
    return OwnRow(func(own.table, *args, **kwargs), own.body)


def _transposed(own: OwnRow, one: int = 0, two: int = 1) -> OwnRow:
    return OwnRow(own.table.transpose(one % own.ndim + 1, two % own.ndim + 1), own.body)


def _squeezed(func: TorchFunction, own: OwnRow, dim: int) -> OwnRow:
    return OwnRow(own.table.squeeze(dim % own.ndim + 1), own.body)


def _table_pieces(func: TorchFunction, own: OwnRow, size: object, dim: int = 0) -> tuple[OwnRow, ...]:
    return tuple(OwnRow(part, own.body) for part in func(own.table, size, dim % own.ndim + 1))


def _matmul(x: object, weight: Any) -> ExpertRows:
    rows = _rows_of_product(x, weight)
    values, table = _as_autocast([rows.values, weight.table])
    return rows.like(expert_mm(values, table, rows.body.ids))


def _rows_of_product(x: object, weight: object) -> ExpertRows:
    """The rows `x`. Raises unless they are multiplied with the matrices of their own experts."""
    if not isinstance(x, ExpertRows) or not isinstance(weight, OwnRow) or x.ndim != 2 or weight.ndim != 2:
        raise dynamic()
    if weight.body is not x.body or x.body.ids is None:
        raise dynamic()
    return x


def _linear(x: object, weight: object, bias: object = None) -> ExpertRows:
    if not isinstance(weight, OwnRow):
        raise dynamic()
    return _matmul(x, _transposed(weight)) if bias is None else _addmm(bias, x, _transposed(weight))


def _addmm(bias: object, x: object, weight: Any) -> ExpertRows:
    """A product with a bias, which is added before the sum is rounded."""
    rows = _rows_of_product(x, weight)
    num, _, width = weight.table.shape
    if isinstance(bias, OwnRow) and tuple(bias.shape) == (width,):
        table = bias.table
    elif is_whole(bias) and tuple(bias.shape) == (width,):
        table = bias.expand(num, width)
    else:
        raise dynamic()
    table, values, weights = _as_autocast([table, rows.values, weight.table])
    return rows.like(expert_addmm(table, values, weights, rows.body.ids))


def _layer_norm(
    func: TorchFunction, x: object, shape: object, weight: object = None, bias: object = None, eps: float = 1e-5
) -> ExpertRows:
    return _norm(lambda rows: func(rows, shape, None, None, eps), x, weight, bias)


def _rms_norm(
    func: TorchFunction, x: object, shape: object, weight: object = None, eps: float | None = None
) -> ExpertRows:
    return _norm(lambda rows: func(rows, shape, None, eps), x, weight, None)


def _norm(compute: Callable[[Tensor], Tensor], x: object, weight: Any, bias: Any) -> ExpertRows:
    """A norm of the last dims of rows, scaled and shifted by the experts of rows; half precision is rounded once."""
    if not isinstance(x, ExpertRows):
        raise dynamic()
    values = x.values.float() if x.values.dtype.itemsize < 4 else x.values
    wide = x.like(compute(values))
    weight, bias = (_looked_up(one, x.ndim) if isinstance(one, OwnRow) else one for one in (weight, bias))
    scaled = wide if weight is None else wide * weight
    found = scaled if bias is None else scaled + bias
    return found.like(found.values.to(x.values.dtype))


def _as_autocast(tensors: list[Tensor]) -> list[Tensor]:
    """The operands of a product, cast as torch.autocast casts them."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return [t.to(dtype) if t.dtype.is_floating_point and t.dtype != torch.float64 else t for t in tensors]


def _index_add(func: TorchFunction, x: object, dim: int, index: object, source: object, *, alpha: float = 1) -> Tensor:
    if not is_whole(x) or dim != 0 or not isinstance(index, ExpertRows) or not isinstance(source, ExpertRows):
        raise dynamic()
    same_rows([index, source])
    terms = source.terms()
    return index.body.adding(x, index.values, terms, alpha, lambda: func(x, 0, index.values, terms, alpha=alpha))


def _numel(x: object) -> UnknownCount:
    if not isinstance(x, ExpertRows) or math.prod(x.values.shape[1:]) == 0:
        raise dynamic()
    return UnknownCount(x.owner, x.body)


def _listed(x: object) -> ExpertRows:
    """Indices as a list, which index as they do."""
    if not isinstance(x, ExpertRows) or x.dim is None:
        raise dynamic()
    return x


_NORMS: dict[str, Callable[..., ExpertRows]] = {"layer_norm": _layer_norm, "rms_norm": _rms_norm}
_LOOKS: dict[str, Callable[..., Any]] = {"where": _where, "nonzero": _nonzero, "numel": _numel, "tolist": _listed}
_ON_TABLE: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("to", "float", "double", "half", "bfloat16"), _on_table),
    **dict.fromkeys(("detach", "contiguous", "clone", "mul", "neg"), _on_table),
    **dict.fromkeys(("t", "transpose", "swapaxes"), lambda func, own, *dims: _transposed(own, *dims)),
    **dict.fromkeys(("chunk", "split"), _table_pieces),
    "squeeze": _squeezed,
}  # fmt: skip
_PRODUCTS: dict[str, Callable[..., ExpertRows]] = {
    "linear": _linear,
    "matmul": _matmul,
    "mm": _matmul,
    "addmm": _addmm,
}
