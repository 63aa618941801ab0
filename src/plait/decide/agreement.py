"""How workers agree through parameter servers: which pushes make an update, and who may go on.

asynchronous     every push is an update of its own, and its worker goes on at once
bounded          so it is too, but a worker that has pushed `bound` times more often than the slowest waits for it
                 (stale synchronous parallel: Ho et al. 2013, "More Effective Distributed ML via a Stale Synchronous
                 Parallel Parameter Server")
synchronous      an update is the mean of one push of every worker, made on the same values; all go on together
with backups     it is the mean of the first pushes, of all workers but `backup`; later ones are left out (Chen et al.
                 2016, "Revisiting Distributed Synchronous SGD")

What happens follows from the order of the events alone. Nothing is exchanged here, and nothing is timed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from plait.errors import PlanError


@dataclass(frozen=True)
class Push:
    """A worker's gradient: made on the values of version `base`; `weight` is the part that it has in a mean."""

    worker: int
    base: int
    weight: float = 1.0


@dataclass(frozen=True)
class Commit:
    """An update, the `number`th of the run: the sum of the members' gradients by their shares, which add up to 1.

    `staleness` has, member by member, the number of updates since the values that its gradient was made on.
    """

    number: int
    members: tuple[int, ...]
    shares: tuple[float, ...]
    staleness: tuple[int, ...]
    ends_step: bool


@dataclass(frozen=True)
class Go:
    """The worker may take the newest values and go on."""

    worker: int


@dataclass(frozen=True)
class Late:
    """The worker's gradient is left out: the update of version `base` was made without it."""

    worker: int
    base: int


@dataclass(frozen=True)
class Refuse:
    """The worker's push is none that could be, for this reason."""

    worker: int
    why: str


Decision = Commit | Go | Late | Refuse


def may_go_on(clocks: Mapping[int, int], worker: int, bound: int | None) -> bool:
    """Whether a worker is at most `bound` pushes ahead of the slowest; None is no bound."""
    return bound is None or clocks[worker] - min(clocks.values()) <= bound


def num_needed(num_members: int, backup: int) -> int:
    """Of how many pushes a synchronous update is made."""
    return max(1, num_members - backup)


def shares_of(weights: Sequence[float]) -> tuple[float, ...]:
    """The part of each gradient in the mean of all; equal parts where nothing weighs anything."""
    total = sum(weights)
    return tuple(w / total for w in weights) if total else (1 / len(weights),) * len(weights)


@dataclass
class Agreement:
    """The events of a run, one after the other, and what each of them decides.

    staleness  None: asynchronous; 0: synchronous; else the bound
    version    updates made so far
    order      the worker of every push in turn, for a run that is to be repeated: a push that comes before its turn
               waits. Where it ends, pushes are taken as they come
    started    whether workers may begin before `num_workers` of them are there
    """

    num_workers: int
    staleness: int | None = None
    backup: int = 0
    version: int = 0
    order: Sequence[int] = ()
    started: bool = False
    clocks: dict[int, int] = field(default_factory=dict)  # pushes that were taken, of every member
    _computing: set[int] = field(default_factory=set)  # who has values and has not pushed since
    _arrived: dict[int, Push] = field(default_factory=dict)  # for the next synchronous update
    _early: dict[int, Push] = field(default_factory=dict)
    _taken: int = 0

    @property
    def synchronous(self) -> bool:
        return self.staleness == 0

    @property
    def updates_per_step(self) -> int:
        """A step takes in one push of every worker: one update, or as many as there are workers."""
        return 1 if self.synchronous else self.num_workers

    def join(self, worker: int) -> list[Decision]:
        """A worker is there; it begins where the slowest is."""
        if worker in self.clocks:
            return []
        self.clocks[worker] = min(self.clocks.values(), default=0)
        if self.started:
            return self._go([worker])
        if len(self.clocks) < self.num_workers:
            return []
        self.started = True
        return self._go(sorted(self.clocks))

    def adopt(self, worker: int) -> None:
        """Take a worker for a member that is computing, as one that another process in this place knew."""
        self.clocks.setdefault(worker, min(self.clocks.values(), default=0))
        self._computing.add(worker)

    def leave(self, worker: int) -> list[Decision]:
        """A worker is gone, with what it has pushed but nobody has used."""
        if self.clocks.pop(worker, None) is None:
            return []
        self._computing.discard(worker)
        self._arrived.pop(worker, None)
        self._early.pop(worker, None)
        return [*self._step_if_complete(), *self._released(), *self._in_order()]

    def push(self, push: Push) -> list[Decision]:
        """A gradient has come."""
        if push.worker not in self.clocks:
            return [Refuse(push.worker, f"worker {push.worker} is no member of this run")]
        if push.worker not in self._computing:
            return [Refuse(push.worker, f"worker {push.worker} pushes without having taken values")]
        if not 0 <= push.base <= self.version:
            why = f"a gradient of version {push.base}, and there are versions 0 to {self.version}"
            return [Refuse(push.worker, why), *self._go([push.worker])]
        self._computing.remove(push.worker)
        self._early[push.worker] = push
        return self._in_order()

    def _in_order(self) -> list[Decision]:
        """Take what has come, as far as its turn is there."""
        found: list[Decision] = []
        while self._early:
            worker = next(iter(self._early))
            if self._taken < len(self.order):
                worker = self.order[self._taken]
                if worker not in self._early:
                    self._refuse_order(worker)
                    break
            self._taken += 1
            found += self._take(self._early.pop(worker))
        return found

    def _refuse_order(self, worker: int) -> None:
        """PlanError where the push whose turn it is can never come."""
        if worker in self.clocks and worker not in self._computing:
            raise PlanError(
                f"the order has worker {worker} push next (push {self._taken + 1}), but it waits for others under"
                f" staleness={self.staleness}; give an order in which it may go on"
            )

    def _take(self, push: Push) -> list[Decision]:
        self.clocks[push.worker] += 1
        if not self.synchronous:
            return [self._commit([push]), *self._released()]
        if push.base < self.version:
            return [Late(push.worker, push.base), *self._go([push.worker])]
        self._arrived[push.worker] = push
        return self._step_if_complete()

    def _step_if_complete(self) -> list[Decision]:
        if not self._arrived or len(self._arrived) < num_needed(len(self.clocks), self.backup):
            return []
        pushes = [self._arrived[worker] for worker in sorted(self._arrived)]
        self._arrived = {}
        return [self._commit(pushes), *self._go([push.worker for push in pushes])]

    def _commit(self, pushes: Sequence[Push]) -> Commit:
        stale = tuple(self.version - push.base for push in pushes)
        self.version += 1
        members = tuple(push.worker for push in pushes)
        shares = shares_of([push.weight for push in pushes])
        return Commit(self.version, members, shares, stale, self.version % self.updates_per_step == 0)

    def _released(self) -> list[Decision]:
        """Of those that wait, who may go on now."""
        if self.synchronous or not self.started:
            return []
        waiting = [w for w in sorted(self.clocks) if w not in self._computing and w not in self._early]
        return self._go([w for w in waiting if may_go_on(self.clocks, w, self.staleness)])

    def _go(self, workers: Sequence[int]) -> list[Decision]:
        self._computing.update(workers)
        return [Go(worker) for worker in workers]
