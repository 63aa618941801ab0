"""Numbers that record how Python uses them, which shows whether a capture depends on a counter."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

PlainNumber = int | float


@dataclass
class Asked:
    """The uses of one number: conditions on it with their answers; with `used`, Python has used the number itself."""

    used: bool = False
    conditions: list[tuple[Callable[[PlainNumber], bool], bool]] = field(default_factory=list)

    def answers(self, value: PlainNumber) -> tuple[bool, ...]:
        """The answers to the conditions for another value."""
        return tuple(condition(value) for condition, _ in self.conditions)


class Tracked:
    """Takes the place of a user's int or float during a capture.

    Its sums, products and remainders are tracked too. A comparison records a condition; anything else uses the number.
    """

    __slots__ = ("asked", "of", "value")

    def __init__(
        self, value: PlainNumber, asked: Asked, of: Callable[[PlainNumber], PlainNumber] = lambda value: value
    ) -> None:
        self.value = value
        self.asked = asked
        self.of = of  # computes this number from the one that the capture began with

    def plain(self) -> PlainNumber:
        self.asked.used = True
        return self.value

    def _computed(self, function: Callable[..., Any], other: object, swapped: bool = False) -> Any:
        if isinstance(other, Tracked):
            other = other.plain()
        if type(other) not in (int, float, bool):
            return NotImplemented if not swapped else function(other, self.plain())
        of = self.of
        if swapped:
            return Tracked(function(other, self.value), self.asked, lambda value: function(other, of(value)))
        return Tracked(function(self.value, other), self.asked, lambda value: function(of(value), other))

    def _asks(self, function: Callable[..., bool], *others: object) -> bool:
        others = tuple(other.plain() if isinstance(other, Tracked) else other for other in others)
        of = self.of
        self.asked.conditions.append((lambda value: bool(function(of(value), *others)), function(self.value, *others)))
        return bool(function(self.value, *others))

    def __bool__(self) -> bool:
        return self._asks(bool)

    def __index__(self) -> int:
        return operator.index(self.plain())  # type: ignore[arg-type]

    def __int__(self) -> int:
        return int(self.plain())

    def __float__(self) -> float:
        return float(self.plain())

    def __neg__(self) -> Any:
        return self._computed(operator.mul, -1)

    def __abs__(self) -> Any:
        return abs(self.plain())

    def __hash__(self) -> int:
        return hash(self.plain())

    def __repr__(self) -> str:  # printing a number does not use it
        return repr(self.value)

    def __format__(self, spec: str) -> str:
        return format(self.value, spec)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.plain(), name)


def _computing(function: Callable[..., Any], swapped: bool) -> Any:
    return lambda self, other: self._computed(function, other, swapped)


def _asking(function: Callable[..., bool]) -> Any:
    return lambda self, other: self._asks(function, other)


for _name in ("add", "sub", "mul", "mod", "floordiv", "truediv", "pow"):
    _function = getattr(operator, _name)
    setattr(Tracked, f"__{_name}__", _computing(_function, False))
    setattr(Tracked, f"__r{_name}__", _computing(_function, True))
for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    setattr(Tracked, f"__{_name}__", _asking(getattr(operator, _name)))


def untracked(value: object) -> Any:
    """The number itself of a tracked one; any other value unchanged."""
    return value.plain() if isinstance(value, Tracked) else value
