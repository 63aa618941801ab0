"""Python numbers of a batch, such as an epoch or the weight of a loss term, as inputs of the captured step.

During capture a `BatchNumber` takes the place of each. What Python computes from it is recorded as an expression, which
Python evaluates again at each step. Where such a number meets a tensor, it becomes a 0-d tensor, an input of the graph.
Where Python needs the number itself, for a shape or a branch, it gets it, and `NumberAsked` records that: the graph is
then valid for batches with the same answers.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_aggregate

from plait.compile.capture.graph_recorder import GraphRecorder
from plait.compile.capture.late_values import LateNumber, LateValues
from plait.compile.capture.log_only import is_shown
from plait.compile.capture.tracked_numbers import PlainNumber, Tracked

_LONGEST = 1000  # characters of an expression; longer ones are evaluated for Python at once
_DTYPES = {"float": torch.float64, "int": torch.int64, "bool": torch.bool}


@dataclass(frozen=True, eq=False)
class Expression:
    """What Python computes from numbers of the batch. Two expressions with the same `text` compute the same."""

    text: str
    function: Callable[..., Any]
    operands: tuple[Any, ...] = ()

    def value(self, numbers: Mapping[str, PlainNumber]) -> Any:
        """The result for these numbers of the batch."""
        found: dict[int, Any] = {}

        def of(one: Any) -> Any:
            if not isinstance(one, Expression):
                return one
            if id(one) not in found:
                found[id(one)] = one.function(*map(of, one.operands)) if one.operands else one.function(numbers)
            return found[id(one)]

        return _python(of(self))

    def answer(self, numbers: Mapping[str, PlainNumber]) -> str:
        """The result as text, with its type unless that is plain; or the error, if there is one."""
        try:
            found = self.value(numbers)
        except Exception as error:
            return f"{type(error).__qualname__}: {error}"
        return f"{found!r}" if type(found) in (bool, int, float, str) else f"{type(found).__qualname__} {found!r}"


@dataclass
class NumberAsked:
    """The expressions of a batch's numbers that Python has evaluated during a capture, with their results."""

    answers: dict[str, tuple[Expression, str]] = field(default_factory=dict)  # by the expression's text

    def note(self, expression: Expression, numbers: Mapping[str, PlainNumber]) -> None:
        self.answers[expression.text] = (expression, expression.answer(numbers))

    def fits(self, numbers: Mapping[str, PlainNumber]) -> bool:
        """Whether other numbers give the same answers."""
        return all(expression.answer(numbers) == answer for expression, answer in self.answers.values())

    def difference(self, other: NumberAsked) -> str:
        """The first expression whose answers differ, with both answers, as text; '' if none differs."""
        for text, (_, answer) in self.answers.items():
            before = other.answers.get(text, (None, answer))[1]
            if before != answer:
                return f"{text} of the batch is {answer} after {before}"
        return ""

    def __str__(self) -> str:
        shown = [f"{text}: {answer}" for text, (_, answer) in self.answers.items() if not text.startswith("kind(")]
        return f" with {', '.join(shown)}" if shown else ""


@dataclass(frozen=True)
class Fed:
    """A 0-d tensor that is an input of the step: the result of an expression."""

    expression: Expression
    dtype: torch.dtype

    def tensor(self, numbers: Mapping[str, PlainNumber]) -> Tensor:
        return torch.tensor(self.expression.value(numbers), dtype=self.dtype)


class BatchNumbers:
    """The numbers of one batch, during a capture on it. `fed` are the 0-d tensors that are inputs of the step, by name,
    and `nodes` their placeholders."""

    def __init__(
        self,
        values: Mapping[str, PlainNumber],
        late: LateValues,
        recorder: GraphRecorder,
        fake_mode: Any,
        inputs: Collection[str],
    ) -> None:
        self._values = dict(values)
        self._inputs = inputs
        self.late = late
        self._recorder = recorder
        self._fake_mode = fake_mode
        self.asked = NumberAsked()
        self.fed: dict[str, Fed] = {}
        self.nodes: dict[str, Node] = {}
        self._fakes: dict[str, Tensor] = {}

    def in_place_of(self, name: str, leaf: Any) -> Any:
        """The value that the step gets in place of a leaf of the batch."""
        if name not in self._values:
            return leaf
        number = BatchNumber(Expression(name, operator.itemgetter(name)), self._values[name], self)
        return number if name in self._inputs else number.plain()

    def need(self, expression: Expression) -> None:
        """Record that Python was told the value of an expression."""
        self.asked.note(expression, self._values)

    def feed(self, expression: Expression, dtype: torch.dtype) -> Tensor:
        """The fake 0-d tensor of an expression. It is on the CPU, where ops on any device accept a scalar."""
        name = f"{expression.text} as {str(dtype).removeprefix('torch.')}"
        if name not in self._fakes:
            self.need(Expression(f"kind({expression.text})", _kind, (expression,)))
            with self._fake_mode:
                fake = torch.empty((), dtype=dtype, device="cpu")
            self.nodes[name] = self._recorder.placeholder("number", fake)
            self.fed[name] = Fed(expression, dtype)
            self._fakes[name] = fake
        return self._fakes[name]

    @contextmanager
    def seen_by_math(self) -> Iterator[None]:
        """Make the functions of `math` compute with such numbers within the context."""
        before = {name: getattr(math, name) for name in _MATH}
        for name, function in before.items():
            setattr(math, name, _of_math(function))
        try:
            yield
        finally:
            for name, function in before.items():
                setattr(math, name, function)


class BatchNumber(LateNumber):
    """Takes the place of a number of the batch, or of one that Python computed from such numbers only."""

    def __init__(self, expression: Expression, value: Any, numbers: BatchNumbers) -> None:
        self.expression = expression
        self.value = value
        self._numbers = numbers
        self._owner = numbers.late
        self._sources = ()
        self.place = ""
        self.computes = True

    @property  # type: ignore[misc]
    def __class__(self) -> Any:  # for isinstance(n, float)
        return type(self.value)

    def plain(self) -> Any:
        """The number itself; the graph is then valid for batches in which it is the same."""
        self._numbers.need(self.expression)
        return self.value

    @property
    def _tensor(self) -> Tensor:
        return self._fed(_DTYPES[type(self.value).__name__])

    @property
    def _floating(self) -> bool:
        return type(self.value) is float

    def _fed(self, dtype: torch.dtype) -> Tensor:
        return self._numbers.feed(self.expression, dtype)

    def _beside(self, tensors: list[Tensor]) -> Tensor:
        dtype = self._dtype_beside(tensors, type(self.value)(1))
        return self._tensor if dtype is None else self._fed(dtype)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        both = (args, kwargs or {})
        if getattr(func, "__name__", "") not in _BY_INDEX:
            tensors: list[Tensor] = []
            map_aggregate(both, lambda v: tensors.append(v) if isinstance(v, Tensor) else None)
            now, named = map_aggregate(both, lambda v: v._beside(tensors) if isinstance(v, LateNumber) else v)
            try:
                return func(*now, **named)
            except (TypeError, RuntimeError):  # the function takes numbers only, or tensors of one dtype
                pass
        args, kwargs = plain_numbers(both)
        return func(*args, **kwargs)

    def __array_ufunc__(self, ufunc: Any, method: str, *operands: object, **kwargs: Any) -> Any:
        if method == "__call__" and not kwargs and all(map(_is_number, operands)):
            return computed(ufunc, *operands)
        return getattr(ufunc, method)(*plain_numbers(operands), **kwargs)

    def __array__(self, dtype: Any = None, copy: object = None) -> Any:
        return np.asarray(self.plain(), dtype)

    def _with(self, other: Any, compute: Callable[[Any, Any], Any]) -> Any:
        raise AssertionError("the operators are written below")

    def __bool__(self) -> bool:
        return bool(self._told(bool))

    def __int__(self) -> int:
        return int(self._told(int))

    __trunc__ = __int__

    def __float__(self) -> float:
        return float(self._told(float))

    def __index__(self) -> int:
        return operator.index(self.plain())

    def __complex__(self) -> complex:
        return complex(self.plain())

    def _told(self, function: Any) -> Any:
        if is_shown():
            return function(self.value)
        expression = Expression(f"{function.__name__}({self.expression.text})", function, (self.expression,))
        found = function(self.value)
        self._numbers.need(expression)
        return found

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(self.plain())

    def __format__(self, spec: str) -> str:
        return format(self.value if is_shown() else self.plain(), spec)

    def __repr__(self) -> str:
        return repr(self.value if is_shown() else self.plain())

    def __neg__(self) -> Any:
        return computed(operator.neg, self)

    def __abs__(self) -> Any:
        return computed(abs, self)

    def __floor__(self) -> Any:
        return computed(math.floor, self)

    def __ceil__(self) -> Any:
        return computed(math.ceil, self)

    def __round__(self, digits: int | None = None) -> Any:
        return computed(round, self) if digits is None else computed(round, self, digits)

    def __divmod__(self, other: Any) -> Any:
        return self // other, self % other

    def __rdivmod__(self, other: Any) -> Any:
        return other // self, other % self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.plain(), name)

    def __reduce__(self) -> Any:  # copies hold the number itself
        return _same, (self.plain(),)


def computed(function: Callable[..., Any], *operands: Any) -> Any:
    """function(*operands), where some operands are numbers of the batch."""
    owner = next(one._numbers for one in operands if isinstance(one, BatchNumber))
    shown = [one.expression.text if isinstance(one, BatchNumber) else repr(one) for one in operands]
    text = f"{_named(function)}({', '.join(shown)})"
    values = [one.value if isinstance(one, BatchNumber) else one for one in operands]
    found = _python(function(*values))
    if type(found).__name__ not in _DTYPES or _kind(found) == repr(found) or len(text) > _LONGEST:
        return _python(function(*plain_numbers(operands)))
    parts = tuple(one.expression if isinstance(one, BatchNumber) else one for one in operands)
    return BatchNumber(Expression(text, function, parts), found, owner)


def _named(function: Any) -> str:
    home = "numpy" if isinstance(function, np.ufunc) else function.__module__
    return function.__name__ if home in ("_operator", "builtins") else f"{home}.{function.__name__}"


def plain_numbers(values: Any) -> Any:
    """Nested values, with numbers of the batch replaced by the numbers themselves."""
    return map_aggregate(values, _plain)


def _plain(value: object) -> Any:
    if isinstance(value, slice):
        return slice(_plain(value.start), _plain(value.stop), _plain(value.step))
    return value.plain() if isinstance(value, BatchNumber) else value


def _python(value: object) -> Any:
    return value.item() if isinstance(value, np.generic) else value


def _kind(value: object) -> str:
    """A key that decides the dtype of a number's tensor: its type, or the number itself if no dtype can hold it."""
    if type(value).__name__ not in _DTYPES or (type(value) is int and not -(2**63) <= value < 2**63):
        return repr(value)
    return type(value).__name__


def _same(value: object) -> Any:
    return value


def _is_number(value: object) -> bool:
    return isinstance(value, BatchNumber) or type(value) in (bool, int, float) or isinstance(value, np.number)


def _operator(function: Callable[[Any, Any], Any], swapped: bool) -> Callable[[BatchNumber, Any], Any]:
    def both(one: object, other: object) -> Any:
        return function(other, one) if swapped else function(one, other)

    def method(self: BatchNumber, other: Any) -> Any:
        if isinstance(other, Tracked):
            other = other.plain()
        if _is_number(other):
            other = _python(other)
            return computed(function, other, self) if swapped else computed(function, self, other)
        if isinstance(other, Tensor):
            return both(self._beside([other]), other)
        if isinstance(other, LateNumber):
            return both(self._owner.number(self._tensor, other), other)
        if isinstance(other, np.ndarray):
            return both(self.plain(), other)
        return NotImplemented

    return method


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
    setattr(BatchNumber, f"__{_name}__", _operator(getattr(operator, _name), False))
    setattr(BatchNumber, f"__r{_name}__", _operator(getattr(operator, _name), True))
for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    setattr(BatchNumber, f"__{_name}__", _operator(getattr(operator, _name), False))
for _name in ("and_", "or_", "xor", "lshift", "rshift"):
    setattr(BatchNumber, f"__{_name.rstrip('_')}__", _operator(getattr(operator, _name), False))
    setattr(BatchNumber, f"__r{_name.rstrip('_')}__", _operator(getattr(operator, _name), True))

_BY_INDEX = frozenset({"__getitem__", "__setitem__"})  # Python is told the value of an index
_MATH = tuple(
    name
    for name in (
        "acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh", "cbrt", "ceil", "copysign", "cos", "cosh",
        "degrees", "erf", "erfc", "exp", "exp2", "expm1", "fabs", "floor", "fmod", "gamma", "hypot", "isfinite",
        "isinf", "isnan", "lgamma", "log", "log10", "log1p", "log2", "pow", "radians", "remainder", "sin", "sinh",
        "sqrt", "tan", "tanh", "trunc",
    )
    if hasattr(math, name)
)  # fmt: skip


def _of_math(function: Callable[..., Any]) -> Callable[..., Any]:
    def called(*args: Any) -> Any:
        if any(isinstance(one, BatchNumber) for one in args) and all(map(_is_number, args)):
            return computed(function, *args)
        return function(*args)

    return called
