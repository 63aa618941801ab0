"""Which dim of each tensor of a batch belongs to which axes."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass, field

from plait.errors import BatchError

ROWS = "rows"  # the dim that the axes cut which cut rows: each rank has its part of it


@dataclass(frozen=True)
class BatchSpec:
    """For tensors of a batch, by name pattern, one word a dim: `rows`, or `-` for a dim that stays whole.

    >>> BatchSpec({"tokens": "-, rows", "mask": "-"}).row_dim("tokens", 3)
    1

    Dims after the last word stay whole, and a tensor without the word `rows` has none: every rank has all of it. The
    first pattern that matches a name decides. Of a tensor that none matches the rows are dim 0, if that is as long as
    the batch has rows.

    A batch says so itself: its class, or the object, has the spec as `batch_spec`. The names of its tensors are their
    paths, as in error messages: `inputs.tokens`, `0`.
    """

    dims: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for pattern, text in self.dims.items():
            words = _words(text)
            if unknown := [word for word in words if word not in (ROWS, "-")]:
                raise BatchError(f"{text!r} for {pattern}: {unknown[0]!r} is no kind of dim; write {ROWS!r} or '-'")
            if words.count(ROWS) > 1:
                raise BatchError(f"{text!r} for {pattern} says of two dims that they are the rows; a tensor has one")

    def names(self, leaf: str) -> bool:
        """Whether a pattern matches the tensor."""
        return self._text(leaf) is not None

    def row_dim(self, leaf: str, ndim: int) -> int | None:
        """The dim of a tensor's rows, if it has any; None where it has none. BatchError for fewer dims than words."""
        if (text := self._text(leaf)) is None:
            return 0 if ndim else None
        words = _words(text)
        if len(words) > ndim and text != "-":
            raise BatchError(
                f"{text!r} has {len(words)} words, and {leaf} of the batch {ndim} dims; give one word a dim"
            )
        return words.index(ROWS) if ROWS in words else None

    def __str__(self) -> str:
        return "; ".join(f"{pattern}: {text}" for pattern, text in self.dims.items())

    def _text(self, leaf: str) -> str | None:
        return next((text for pattern, text in self.dims.items() if fnmatch.fnmatchcase(leaf, pattern)), None)


DIM_0 = BatchSpec()


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",")]
