"""Compression of what replicas exchange."""

from __future__ import annotations

from dataclasses import dataclass

PLAIN = ("none", "bf16", "fp8", "int8", "int4")


@dataclass(frozen=True)
class Compression:
    """A compressor: its `kind` is one of `PLAIN`, `topk` with a `fraction` of elements, or `powersgd` with a `rank`.

    >>> str(Compression.parse("powersgd:2"))
    'powersgd:2'
    """

    kind: str = "none"
    fraction: float = 0.0
    rank: int = 0

    @classmethod
    def parse(cls, word: str) -> Compression:
        """Read a word of a plan. Raises ValueError with a text that says how words look."""
        kind, colon, number = word.partition(":")
        try:
            if kind == "topk" and colon:
                return cls(kind, fraction=float(number))
            if kind == "powersgd" and colon:
                return cls(kind, rank=int(number))
        except ValueError:
            kind = ""
        if colon or kind not in PLAIN:
            raise ValueError(
                f"it is one of {', '.join(PLAIN)}, topk:FRACTION like topk:0.01, powersgd:RANK like powersgd:2"
            )
        return cls(kind)

    def check(self) -> None:
        """Raise ValueError if the fraction or the rank is out of range."""
        if self.kind == "topk" and not 0 < self.fraction <= 1:
            raise ValueError("topk keeps a fraction of the elements, more than 0 and at most 1")
        if self.kind == "powersgd" and self.rank < 1:
            raise ValueError("powersgd has a rank of 1 or more")

    def __str__(self) -> str:
        number = {"topk": f":{self.fraction:g}", "powersgd": f":{self.rank}"}
        return self.kind + number.get(self.kind, "")


NO_COMPRESSION = Compression()
