"""Builds schedules: placements of stages on ranks, and lists of actions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from plait.spec.schedule import BACKWARD, FORWARD, WEIGHT, Action, Schedule

StagePlacement = tuple[tuple[int, ...], ...]


def round_robin(num_ranks: int, chunks: int = 1) -> StagePlacement:
    """Rank r has stages r, r + num_ranks, ..."""
    return tuple(tuple(chunk * num_ranks + rank for chunk in range(chunks)) for rank in range(num_ranks))


def v_shape(num_ranks: int) -> StagePlacement:
    """Two stages per rank, placed like a V: rank 0 has the first and the last."""
    return tuple((rank, 2 * num_ranks - 1 - rank) for rank in range(num_ranks))


def make(name: str, num_micro: int, stages: StagePlacement, actions: Callable[[int], Iterable[Action]]) -> Schedule:
    """A schedule from a function that returns the actions of a rank.

    The function may pad the microbatches. Actions of microbatches from `num_micro` on are left out, and ranks wait in
    their place.
    """
    ranks = tuple(
        tuple(action for action in actions(rank) if action.micro is None or action.micro < num_micro)
        for rank in range(len(stages))
    )
    return Schedule(name, num_micro, stages, ranks)


def forward(micro: int, chunk: int = 0) -> Action:
    return Action(FORWARD, micro, chunk)


def backward(micro: int, chunk: int = 0) -> Action:
    return Action(BACKWARD, micro, chunk)


def weight(micro: int, chunk: int = 0) -> Action:
    return Action(WEIGHT, micro, chunk)


class ActionBuilder:
    """Builds a rank's list of actions. Each call appends an action for the next microbatch of its kind and chunk."""

    def __init__(self) -> None:
        self.actions: list[Action] = []
        self._count: dict[tuple[str, int], int] = {}
        self._owed: list[Action] = []

    def forward(self, chunk: int = 0) -> None:
        self._next(FORWARD, chunk)

    def backward(self, chunk: int = 0) -> None:
        """Append a backward that is not split."""
        self._next(BACKWARD, chunk)

    def inputs(self, chunk: int = 0) -> None:
        """Append the part of a backward for the inputs; its part for the weights is due later."""
        self._next(BACKWARD, chunk)
        self._owed.append(Action(WEIGHT, self.actions[-1].micro, chunk))

    def weight(self) -> None:
        """Append the part for the weights that has been due for longest."""
        self.actions.append(self._owed.pop(0))

    def weights(self) -> None:
        """Append all parts for the weights that are due."""
        self.actions += self._owed
        self._owed.clear()

    def done(self, kind: str, chunk: int = 0) -> int:
        """The number of actions of that kind and chunk so far."""
        return self._count.get((kind, chunk), 0)

    def _next(self, kind: str, chunk: int) -> None:
        micro = self._count.get((kind, chunk), 0)
        self._count[kind, chunk] = micro + 1
        self.actions.append(Action(kind, micro, chunk))


def alternate(first: Sequence[Action], second: Sequence[Action], ahead: int) -> list[Action]:
    """`ahead` items of `first`, then one of `second` and one of `first` in turn, then the rest of the longer list."""
    found = list(first[:ahead])
    rest = list(first[ahead:])
    for i, action in enumerate(second):
        found.append(action)
        found += rest[i : i + 1]
    return found + rest[len(second) :]
