"""Pieces of the data handed out to workers that come and go: every piece is trained on once, in order.

Pieces are numbered through the whole run: piece n is part n % num_parts of batch n // num_parts. A worker that takes
several steps before it agrees is given the same part of as many batches, by the first of these pieces. It knows the
piece after the one that it works on, so that it can read ahead.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class Handout:
    """`next_piece` is the first that nobody was given."""

    next_piece: int = 0
    num_parts: int = 1
    num_batches: int = 1
    _now: dict[int, list[int]] = field(default_factory=dict)
    _ahead: dict[int, int] = field(default_factory=dict)
    _returned: list[int] = field(default_factory=list)

    def give(self, workers: Sequence[int]) -> list[tuple[int, int, int]]:
        """(worker, piece to work on, piece after it) of workers that go on together, each as often as it is named."""
        found = []
        for worker in workers:
            piece = self._ahead.pop(worker) if worker in self._ahead else self._fresh()
            self._now.setdefault(worker, []).append(piece)
            found.append((worker, piece))
        for worker in workers:
            if worker not in self._ahead:
                self._ahead[worker] = self._fresh()
        return [(worker, piece, self._after(worker, piece)) for worker, piece in found]

    def holds(self, worker: int, piece: int) -> bool:
        """Whether the worker was given the piece, and its gradient has not come."""
        return piece in self._now.get(worker, ())

    def used(self, worker: int, piece: int) -> None:
        """The worker's gradient of the piece has come."""
        if self.holds(worker, piece):
            self._now[worker].remove(piece)

    def take_back(self, worker: int) -> list[int]:
        """The worker is gone: others get what it was given and has not used. Returns what it was to work on."""
        now = self._now.pop(worker, [])
        for piece in now + ([self._ahead.pop(worker)] if worker in self._ahead else []):
            heapq.heappush(self._returned, piece)
        return now

    def _after(self, worker: int, piece: int) -> int:
        now = self._now[worker]
        later = now.index(piece) + 1
        return now[later] if later < len(now) else self._ahead[worker]

    def _fresh(self) -> int:
        if self._returned:
            return heapq.heappop(self._returned)
        piece = self.next_piece
        self.next_piece += 1
        if self.next_piece % self.num_parts == 0:
            self.next_piece += (self.num_batches - 1) * self.num_parts
        return piece
