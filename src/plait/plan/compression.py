"""How what replicas exchange is made smaller on the wire."""

from __future__ import annotations

from dataclasses import dataclass

PLAIN = ("none", "bf16", "fp8", "int8", "int4")


@dataclass(frozen=True)
class Compression:
    """`kind` is one of PLAIN, `topk` with the `fraction` of elements that is kept, or `powersgd` with its `rank`.

    >>> str(Compression.parse("powersgd:2"))
    'powersgd:2'
    """

    kind: str = "none"
    fraction: float = 0.0
    rank: int = 0

    @classmethod
    def parse(cls, word: str) -> Compression:
        """Read a word; ValueError says what a word looks like."""
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
        """ValueError for numbers that make no sense."""
        if self.kind == "topk" and not 0 < self.fraction <= 1:
            raise ValueError("topk keeps a fraction of the elements, more than 0 and at most 1")
        if self.kind == "powersgd" and self.rank < 1:
            raise ValueError("powersgd has a rank of 1 or more")

    def __str__(self) -> str:
        number = {"topk": f":{self.fraction:g}", "powersgd": f":{self.rank}"}
        return self.kind + number.get(self.kind, "")


NO_COMPRESSION = Compression()
