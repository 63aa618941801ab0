"""The steps after which replicas synchronize. They form rounds; each part of the model synchronizes once a round.

    sync=4                 1 2 3 4| 5 6 7 8|               every part at the end of a round
    sync=4 streaming=2     1 2a 3 4b| 5 6a 7 8b|           part a in the middle, part b at the end
    sync=1..4              1| 2 3| 4 5 6 7| 8 9 10 11|     rounds that grow

With `overlap`, an exchange that begins after step n is applied after step n + overlap (Douillard et al. 2025,
"Streaming DiLoCo with overlapping communication").
"""

from __future__ import annotations

from dataclasses import dataclass

from plait.plan.plan import Plan


@dataclass(frozen=True)
class SyncRounds:
    """The steps after which the replicas of a plan synchronize.

    Attributes:
        sync: steps in a round, or (first, last) for rounds that double from `first` to `last` steps.
        parts: parts of the model, each with its own moment in a round.
        overlap: steps between the beginning of an exchange and its use.
    """

    sync: int | tuple[int, int]
    parts: int = 1
    overlap: int = 0

    @classmethod
    def of(cls, plan: Plan) -> SyncRounds:
        """The rounds of a plan with `sync=`."""
        return cls(plan.sync, plan.streaming, plan.overlap)

    def begun(self, step: int) -> tuple[int, ...]:
        """The parts whose exchange begins after step `step`, counted from 1."""
        if step < 1:
            return ()
        start, length = self.round_of(step)
        return tuple(part for part in range(self.parts) if step - start == length * (part + 1) // self.parts)

    def ended(self, step: int) -> tuple[int, ...]:
        """The parts whose exchange is applied after step `step`."""
        return self.begun(step - self.overlap)

    def meeting_after(self, step: int) -> int:
        """The first step after which a replica knows that all replicas have done more than `step` steps: it has then
        waited for an exchange that began after them."""
        at = step + 1 + self.overlap
        while not self.ended(at):
            at += 1
        return at

    def round_of(self, step: int) -> tuple[int, int]:
        """The number of steps before the round of `step`, and the number of steps in that round."""
        if isinstance(self.sync, int):
            return (step - 1) // self.sync * self.sync, self.sync
        length, last = self.sync
        start = 0
        while length < last and step > start + length:
            start += length
            length = min(2 * length, last)
        return start + (step - 1 - start) // length * length, length


def split_in_parts(sizes: list[int], parts: int) -> list[int]:
    """The part of the model that each tensor is in. Parts are runs of consecutive tensors of about the same bytes."""
    total, done, found = sum(sizes), 0, []
    for size in sizes:
        found.append(min(int((done + size / 2) / max(total, 1) * parts), parts - 1))
        done += size
    return found
