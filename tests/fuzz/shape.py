"""What flows between the layers of a drawn model."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Shape:
    """A value's kind and sizes but its rows: sequence [length, width], image [width, height, height], or vector."""

    kind: str
    width: int
    length: int = 1  # positions of a sequence, height of an image
    memory: int = 8  # width of the batch's memory, which cross-attention reads

    def with_width(self, width: int) -> Shape:
        return replace(self, width=width)

    def with_length(self, length: int) -> Shape:
        return replace(self, length=length)

    def as_kind(self, kind: str, width: int, length: int = 1) -> Shape:
        return replace(self, kind=kind, width=width, length=length)
