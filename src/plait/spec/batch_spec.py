"""BatchSpec: the dim of each tensor of a batch that mesh axes cut."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass, field

from plait.errors import BatchError

ROWS = "rows"  # a dim that mesh axes such as `data` cut: each rank reads its part of it
SEQUENCE = "sequence"  # a dim of positions, which mesh axes such as `context` cut
_WORDS = (ROWS, SEQUENCE, "-")


@dataclass(frozen=True)
class BatchSpec:
    """For each tensor of a batch, by name pattern, one word per dim: `rows`, `sequence`, or `-` for a dim that stays
    whole.

    >>> BatchSpec({"tokens": "sequence, rows", "mask": "-"}).row_dim("tokens", 3)
    1

    Dims after the last word stay whole. A tensor without the word `rows` is whole on every rank. The first pattern that
    matches a name decides. A tensor that no pattern matches has its rows in dim 0, provided that dim 0 is as long as
    the batch has rows.

    A batch carries its spec as an attribute `batch_spec` of the object or of its class. Tensors are named by their
    paths in the batch, as in error messages: `inputs.tokens`, `0`. If no pattern has the word `sequence`, plait finds
    the sequences (compile/capture/batch.py).

    `pad` has by name pattern the values with which `shapes=` pads a tensor, such as {"document": -1}. Values of other
    tensors are found (engine/padding_rules.py).

    Raises BatchError for an unknown word, for a tensor with two dims of rows, and for a padding value that is no
    number.
    """

    dims: Mapping[str, str] = field(default_factory=dict)
    pad: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for pattern, text in self.dims.items():
            words = _words(text)
            if unknown := [word for word in words if word not in _WORDS]:
                raise BatchError(
                    f"{text!r} for {pattern}: {unknown[0]!r} is no kind of dim; write {ROWS!r}, {SEQUENCE!r} or '-'"
                )
            for word in (ROWS, SEQUENCE):
                if words.count(word) > 1:
                    raise BatchError(
                        f"{text!r} for {pattern} says of two dims that they are the {word}; a tensor has one"
                    )

        for pattern, value in self.pad.items():
            if not isinstance(value, (bool, int, float)):
                raise BatchError(f"the padding value of {pattern} is {value!r}; give a number, or True or False")

    @property
    def has_sequences(self) -> bool:
        """Whether a pattern says which dim is a sequence."""
        return any(SEQUENCE in _words(text) for text in self.dims.values())

    def names(self, leaf: str) -> bool:
        """Whether a pattern matches the tensor."""
        return self._text(leaf) is not None

    def row_dim(self, leaf: str, ndim: int) -> int | None:
        """The index of the dim that holds the rows, or None if the tensor is whole on every rank.

        Raises BatchError if the pattern has more words than the tensor has dims (`ndim`).
        """
        if (text := self._text(leaf)) is None:
            return 0 if ndim else None
        words = _words(text)
        if len(words) > ndim and text != "-":
            raise BatchError(
                f"{text!r} has {len(words)} words, and {leaf} of the batch {ndim} dims; give one word a dim"
            )
        return words.index(ROWS) if ROWS in words else None

    def sequence_dim(self, leaf: str) -> int | None:
        """The index of the dim that is a sequence, or None if no word says that the tensor has one."""
        words = _words(self._text(leaf) or "")
        return words.index(SEQUENCE) if SEQUENCE in words else None

    def pad_value(self, leaf: str) -> float | None:
        """The value with which a tensor is padded, or None if no pattern matches its name."""
        return next((value for pattern, value in self.pad.items() if fnmatch.fnmatchcase(leaf, pattern)), None)

    def __str__(self) -> str:
        return "; ".join(f"{pattern}: {text}" for pattern, text in self.dims.items())

    def _text(self, leaf: str) -> str | None:
        return next((text for pattern, text in self.dims.items() if fnmatch.fnmatchcase(leaf, pattern)), None)


DIM_0 = BatchSpec()


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",")]
