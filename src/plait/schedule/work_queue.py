"""Gives pieces of the data to workers that come and go, so that every piece is trained on once, in order.

Pieces are numbered through the whole run: piece n is part n % num_parts of batch n // num_parts. A worker that takes
several steps before it synchronizes gets the same part of as many batches, named by the first of these pieces. A worker
knows its next piece while it works on one, so that it can read ahead.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class WorkQueue:
    """The pieces that are still to be trained on, and those that each worker has.

    Attributes:
        next_piece: the first piece that no worker was given.
        num_parts: parts of a batch.
        num_batches: batches of which a worker gets its part at once.
    """

    next_piece: int = 0
    num_parts: int = 1
    num_batches: int = 1
    _now: dict[int, list[int]] = field(default_factory=dict)
    _ahead: dict[int, int] = field(default_factory=dict)
    _returned: list[int] = field(default_factory=list)

    def give(self, workers: Sequence[int]) -> list[tuple[int, int, int]]:
        """Give each worker its next piece; a worker that is named twice gets two.

        Returns (worker, piece to work on, piece after it) for each.
        """
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
        """Whether the worker has the piece, and its gradient has not come."""
        return piece in self._now.get(worker, ())

    def used(self, worker: int, piece: int) -> None:
        """Note that the worker's gradient of the piece has come."""
        if self.holds(worker, piece):
            self._now[worker].remove(piece)

    def take_back(self, worker: int) -> list[int]:
        """Put the pieces of a worker that has left back in the queue. Returns those that it was to work on."""
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
