"""Rows that a boolean mask selects, when the mask is known only as the step runs: all rows, and which of them count."""

from __future__ import annotations

import dis
import functools
import operator
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import CodeType
from typing import Any, NamedTuple, NoReturn, Protocol, TypeGuard

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DynamicOutputShapeException
from torch.fx import Node
from torch.fx.node import map_aggregate

from plait.compile.capture.late_values import LateValues

_TORCH = os.path.dirname(torch.__file__)
FILL = 0.5  # in rows that do not count: log, sqrt, 1/x, asin and their gradients are finite there

TorchFunction = Callable[..., Any]
# What a torch function does with selections, by its name without leading or trailing underscores (masked_ops.py).
HANDLERS: dict[str, Callable[..., Any]] = {}


class Addition(NamedTuple):
    """Rows that were added to a value.

    Attributes:
        calls: those that have added them.
        before: the value without them.
        after: the value with them, which may be the same tensor.
        was: the node of the value without them.
        mask: the mask that selects them.
        round: the round of a loop that they are of, if any.
    """

    calls: Sequence[Node]
    before: Tensor
    after: Tensor
    was: Node
    mask: Node | None
    round: object = None


class Owner(Protocol):
    """Makes selections."""

    late: LateValues

    def mask(self, keep: Tensor) -> Tensor:
        """The mask, or an earlier one that is computed in the same way."""

    def each(self, places: Selected) -> Iterator[Any]:
        """What a loop over the places that a mask selects goes through."""

    def adding(self, x: Tensor, keep: Tensor, add: Callable[[], object]) -> Any:
        """Add rows that a mask selects to a value, with `add`, which returns the value or None."""

    def note_addition(self, addition: Addition) -> None:
        """Note that rows were added to a value."""

    def reduced(self, found: Tensor) -> Tensor:
        """Note that `found` is computed from several rows, and so may be NaN if there are none. Returns it."""

    def beside(self, x: Tensor, rows: Selected) -> Tensor:
        """The tensor `x`, with which rows are combined, without NaN if none of the rows counts."""

    def note_table(self, table: Tensor, number: int, conditions: Sequence[object]) -> None:
        """Note that the parameter of one expert was used, on conditions, for which a stack of those of all is taken."""

    def has_rows(self, asks: object, expected: bool) -> bool:
        """The answer for Python to whether a round has rows: `expected`, the answer if it has some."""

    def has_length(self, asks: object) -> int:
        """The answer for Python to how many rows a round has, where only 0 or more matters."""


class Selected:
    """All rows of `values`, and `keep`, one bool per row, which says whether the row counts.

    With `positions`, the values are the indices of the rows."""

    def __init__(self, values: Tensor, keep: Tensor, owner: Owner, positions: bool = False) -> None:
        self.values = values
        self.keep = keep
        self.positions = positions
        self.owner = owner

    @classmethod
    def of(cls, rows: Tensor, mask: Tensor, owner: Owner) -> Selected:
        """The rows that the mask, one bool per row in any shape, selects."""
        empty = cls(rows, owner.mask(mask), owner)
        return empty.like(empty.filled(rows))

    def like(self, values: Tensor) -> Selected:
        """Other values for the same rows."""
        return Selected(values, self.keep, self.owner)

    def reshaped(self, values: Tensor) -> Selected:
        """The same values in another shape; with one in each row, they are still the indices of the rows."""
        found = self.like(values)
        found.positions = self.positions and values.numel() == len(values)
        return found

    def filled(self, values: Tensor, fill: float | None = None) -> Tensor:
        """The values, with a constant in the rows that do not count."""
        if fill is None:
            fill = FILL if values.dtype.is_floating_point or values.dtype.is_complex else 0
        wide = self.keep.reshape(self.keep.shape + (1,) * (values.ndim - 1))
        return torch.where(wide, values, torch.full((), fill, dtype=values.dtype, device=values.device))

    def between(self, begin: int, end: int | None) -> Selected:
        """The rows at the places from `begin` to `end`, of those that count."""
        place = self.keep.cumsum(0)
        keep = self.keep & (place > begin)
        found = Selected(self.values, self.owner.mask(keep if end is None else keep & (place <= end)), self.owner)
        if not self.positions:
            return found.like(found.filled(self.values))
        found.positions = True
        return found

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """Tensor where Python asks isinstance(x, Tensor), so that a model goes on as with the rows themselves.

        PyTorch's C++ code asks too, and would take the memory of this object for that of a tensor.
        """
        frame = sys._getframe(1)
        return Tensor if type(self) is Selected and _calls_isinstance(frame.f_code, frame.f_lasti) else type(self)

    @property
    def count(self) -> Tensor:
        """The number of rows that count, as a 0-d tensor."""
        return self.keep.sum()

    # attributes of a tensor

    @property
    def shape(self) -> tuple[Any, ...]:
        return (self.owner.late.number(self.count), *self.values.shape[1:])

    @property
    def ndim(self) -> int:
        return self.values.ndim

    @property
    def data(self) -> Selected:
        return self.like(self.values.detach())

    def __getattr__(self, name: str) -> Any:
        if name in ("dtype", "device", "requires_grad", "is_cuda", "layout", "is_sparse", "is_meta", "is_quantized"):
            return getattr(self.values, name)
        method = None if name.startswith("__") else getattr(Tensor, name, None)
        if not callable(method):
            if hasattr(Tensor, name) and not name.startswith("__"):
                raise dynamic()
            raise AttributeError(name)
        return lambda *args, **kwargs: type(self).__torch_function__(method, (), (self, *args), kwargs)

    def __iter__(self) -> Iterator[Any]:
        return self.owner.each(self)

    def __len__(self) -> int:
        raise dynamic()

    def __bool__(self) -> bool:
        raise dynamic()

    __hash__ = object.__hash__

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        handler = HANDLERS.get(name) or HANDLERS.get(name.strip("_"))
        if handler is None:
            raise dynamic()
        return handler(func, *args, **kwargs)


class InOne:
    """x[None, rows]: rows as the one element of a first dim, which a view or squeeze(0) leaves out again."""

    def __init__(self, rows: Selected) -> None:
        self._rows = rows

    def reshape(self, *shape: object) -> Any:
        sizes = shape[0] if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape
        if not sizes or sizes[0] != -1:
            raise dynamic()
        return self._rows.reshape(sizes)

    view = reshape

    def squeeze(self, dim: int) -> Selected:
        if dim != 0:
            raise dynamic()
        return self._rows

    def __getitem__(self, index: object) -> Selected:
        if type(index) is not int or index != 0:
            raise dynamic()
        return self._rows

    def __getattr__(self, name: str) -> Any:
        raise dynamic()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise dynamic()


class UnknownCount:
    """A number of rows that is not known while the step is captured. It may be a size of a view, or compared with 0.
    Any other use raises.

    With `owner`, the rows are those of the round `asks`.
    """

    __slots__ = ("_asks", "_owner")

    def __init__(self, owner: Owner | None = None, asks: object = None) -> None:
        self._owner = owner
        self._asks = asks

    def __getattribute__(self, name: str) -> Any:
        if name == "__class__":
            return UnknownCount
        raise dynamic()

    def _raise(self, *others: object) -> NoReturn:
        raise dynamic()

    def __bool__(self) -> bool:
        return bool(_asked(self, True))

    __index__ = __int__ = __float__ = _raise
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __floordiv__ = __truediv__ = __rtruediv__ = _raise
    __hash__ = object.__hash__


def _asked(count: UnknownCount, expected: bool) -> HasRows:
    owner = object.__getattribute__(count, "_owner")
    if owner is None:
        raise dynamic()
    return HasRows(owner, object.__getattribute__(count, "_asks"), expected)


def _comparison(compare: Callable[[int, int], bool]) -> Callable[[UnknownCount, object], HasRows]:
    def method(count: UnknownCount, other: object) -> HasRows:
        if type(other) is not int or compare(1, other) is not compare(_MANY, other):
            raise dynamic()
        if compare(0, other) is compare(1, other):
            raise dynamic()
        return _asked(count, compare(1, other))

    return method


_MANY = 1 << 62
for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    setattr(UnknownCount, f"__{_name}__", _comparison(getattr(operator, _name)))


class HasRows:
    """Whether a round of a loop has rows, for Python to ask; `expected` is the answer if it has."""

    def __init__(self, owner: Owner, asks: object, expected: bool) -> None:
        self._owner = owner
        self._asks = asks
        self._expected = expected

    def __bool__(self) -> bool:
        return self._owner.has_rows(self._asks, self._expected)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise dynamic()


def dynamic(why: str = "") -> DynamicOutputShapeException:
    """torch's own error for a result whose shape depends on the numbers in a tensor; `why` says what to do instead."""
    error = DynamicOutputShapeException(torch.ops.aten.nonzero.default)
    error.why = why  # type: ignore[attr-defined]
    return error


@functools.lru_cache(maxsize=1024)
def _calls_isinstance(code: CodeType, offset: int) -> bool:
    """Whether the instruction at an offset calls `isinstance`: what it calls is loaded where the call begins.

    In PyTorch's own code only torch.is_tensor does; other functions there go on to C++.
    """
    if code.co_filename.startswith(_TORCH) and code is not torch.is_tensor.__code__:
        return False
    found = list(dis.get_instructions(code))
    call = next((each for each in found if each.offset == offset), None)
    if call is None or call.positions is None or "CALL" not in call.opname:
        return False
    begin = call.positions[::2]
    names = (each for each in found if each.opname in ("LOAD_GLOBAL", "LOAD_NAME") and each.argval == "isinstance")
    return any(each.positions is not None and each.positions[::2] == begin for each in names)


@contextmanager
def functions_take_whole_rows() -> Iterator[None]:
    """Context in which a user's autograd.Function refuses selected rows: its backward would be left out."""
    plain = torch.autograd.Function.__dict__["apply"]

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if not cls.__module__.startswith("torch.") and any(isinstance(each, Selected) for each in args):
            raise dynamic()
        return plain.__func__(cls, *args, **kwargs)

    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        torch.autograd.Function.apply = plain  # type: ignore[method-assign]


def is_whole(value: object) -> TypeGuard[Tensor]:
    """Whether a value is a tensor, and no selection, which isinstance takes for one."""
    return isinstance(value, Tensor) and not issubclass(type(value), Selected)


def same_rows(values: Any) -> list[Selected]:
    """The selections among nested values. Raises unless all are of the same rows."""
    found: list[Selected] = []
    map_aggregate(values, lambda v: found.append(v) if isinstance(v, Selected) else None)
    if any(one.keep is not found[0].keep for one in found):
        raise dynamic()
    return found


def plain(values: Any) -> Any:
    """The nested values, with each selection replaced by all of its rows."""
    return map_aggregate(values, lambda v: v.values if isinstance(v, Selected) else v)


def rows_of(values: Sequence[object], compute: Callable[..., Tensor]) -> Selected:
    """Apply `compute` to the values row by row."""
    first = same_rows(list(values))[0]
    return first.like(compute(*plain(list(values))))
