"""What the arguments of the public functions may be: one row each, checked before anything starts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from plait.errors import PlaitError, PlanError


@dataclass(frozen=True)
class Argument:
    """fits    whether a value can be taken
    give    what to give instead, for the message
    error   the exception for one that cannot
    """

    fits: Callable[[Any], bool]
    give: str
    error: type[PlaitError] = PlanError


ARGUMENTS = {
    "on_nan": Argument(
        lambda it: isinstance(it, str) and it in ("raise", "warn"),
        "give 'raise', which stops at a loss that is not finite, or 'warn', which goes on",
    ),
}


def check_arguments(**given: Any) -> None:
    """Raise the error of the first of these arguments, by name, that cannot be taken."""
    for name, value in given.items():
        row = ARGUMENTS[name]
        if not row.fits(value):
            raise row.error(f"{name}={_shown(value)}: {row.give}")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
