"""Bytes sent over each link, as each rank counts them."""

from __future__ import annotations

from collections import Counter


class Links:
    """Bytes that this rank has sent, by the global rank of the receiver."""

    def __init__(self) -> None:
        self.sent: Counter[int] = Counter()

    def count(self, to: int, num_bytes: int) -> None:
        self.sent[to] += num_bytes

    def total(self) -> int:
        return sum(self.sent.values())

    def reset(self) -> None:
        self.sent.clear()
