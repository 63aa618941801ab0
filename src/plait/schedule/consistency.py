"""How workers agree through parameter servers: which pushes make an update, and who may go on.

asynchronous     every push is an update of its own, and its worker goes on at once
bounded          so it is too, but a worker that has pushed `bound` times more often than the slowest waits for it
                 (stale synchronous parallel: Ho et al. 2013, "More Effective Distributed ML via a Stale Synchronous
                 Parallel Parameter Server")
synchronous      an update is the mean of one push of every worker, made on the same values; all go on together
with backups     it is the mean of the first pushes, of all workers but `backup`; later ones are left out (Chen et al.
                 2016, "Revisiting Distributed Synchronous SGD")

In the first two a worker may have `overlap` tasks more than the one that it computes, so that its push and what it
takes next travel while it computes: its gradient k is made on the values once its push k - 1 - overlap was taken in.

What happens follows from the order of the events alone. Nothing is exchanged here, and nothing is timed.
"""

from __future__ import annotations

import random
from collections import Counter
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
    """The worker may take the newest values for one more task."""

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


def may_go_on(clocks: Mapping[int, int], worker: int, bound: int | None, under_way: int = 0) -> bool:
    """Whether a worker, with all under way, is at most `bound` pushes ahead of the slowest; None is no bound."""
    return bound is None or clocks[worker] + under_way - min(clocks.values()) <= bound


def num_needed(num_members: int, backup: int) -> int:
    """Of how many pushes a synchronous update is made."""
    return max(1, num_members - backup)


def shares_of(weights: Sequence[float]) -> tuple[float, ...]:
    """The part of each gradient in the mean of all; equal parts where nothing weighs anything."""
    total = sum(weights)
    return tuple(w / total for w in weights) if total else (1 / len(weights),) * len(weights)


@dataclass
class Consistency:
    """The events of a run, one after the other, and what each of them decides.

    staleness  None: asynchronous; 0: synchronous; else the bound
    version    updates made so far
    order      the worker of every push in turn, for a run that is to be repeated: a push that comes before its turn
               waits. Where it ends, pushes are taken as they come
    started    whether workers may begin before `num_workers` of them are there
    overlap    tasks of a worker beside the one that it computes; not in the synchronous mode
    """

    num_workers: int
    staleness: int | None = None
    backup: int = 0
    version: int = 0
    order: Sequence[int] = ()
    started: bool = False
    overlap: int = 0
    clocks: dict[int, int] = field(default_factory=dict)  # pushes that were taken, of every member
    _tasks: Counter[int] = field(default_factory=Counter)  # of every member, those that it has not pushed for
    _arrived: dict[int, Push] = field(default_factory=dict)  # for the next synchronous update
    _early: list[Push] = field(default_factory=list)
    _taken: int = 0

    @property
    def synchronous(self) -> bool:
        return self.staleness == 0

    @property
    def updates_per_step(self) -> int:
        """A step takes in one push of every worker: one update, or as many as there are workers."""
        return 1 if self.synchronous else self.num_workers

    def join(self, worker: int) -> list[Decision]:
        """A worker is there, with nothing to do; it begins where the slowest is."""
        self.clocks.setdefault(worker, min(self.clocks.values(), default=0))
        self._tasks[worker] = 0
        if self.started:
            return self._begun([worker])
        if len(self.clocks) < self.num_workers:
            return []
        self.started = True
        return self._begun(sorted(self.clocks))

    def adopt(self, worker: int) -> None:
        """Take a worker for a member that has its tasks, as one that another process in this place knew."""
        self.clocks.setdefault(worker, min(self.clocks.values(), default=0))
        self._tasks[worker] = 1 + self.overlap

    def leave(self, worker: int) -> list[Decision]:
        """A worker is gone, with what it has pushed but nobody has used."""
        if self.clocks.pop(worker, None) is None:
            return []
        self._tasks.pop(worker, None)
        self._arrived.pop(worker, None)
        self._early = [push for push in self._early if push.worker != worker]
        return [*self._step_if_complete(), *self._released(), *self._in_order()]

    def push(self, push: Push) -> list[Decision]:
        """A gradient has come."""
        if push.worker not in self.clocks:
            return [Refuse(push.worker, f"worker {push.worker} is no member of this run")]
        if not self._tasks[push.worker]:
            return [Refuse(push.worker, f"worker {push.worker} pushes without having taken values")]
        if not 0 <= push.base <= self.version:
            why = f"a gradient of version {push.base}, and there are versions 0 to {self.version}"
            return [Refuse(push.worker, why), Go(push.worker)]
        self._tasks[push.worker] -= 1
        self._early.append(push)
        return self._in_order()

    def _in_order(self) -> list[Decision]:
        """Take what has come, as far as its turn is there."""
        found: list[Decision] = []
        while self._early:
            push: Push | None = self._early[0]
            if self._taken < len(self.order):
                worker = self.order[self._taken]
                push = next((push for push in self._early if push.worker == worker), None)
                if push is None:
                    self._refuse_order(worker)
                    break
            assert push is not None
            self._taken += 1
            self._early.remove(push)
            found += self._take(push)
        return found

    def _refuse_order(self, worker: int) -> None:
        """PlanError where the push whose turn it is can never come."""
        if worker in self.clocks and not self._tasks[worker]:
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
        return [] if self.synchronous or not self.started else self._begun(sorted(self.clocks))

    def _begun(self, workers: Sequence[int]) -> list[Decision]:
        """Each of these, in turn, gets the tasks that it may have."""
        found: list[Decision] = []
        early = Counter(push.worker for push in self._early)
        for _ in range(1 + self.overlap):
            for worker in workers:
                under_way = self._tasks[worker] + early[worker]
                if under_way <= self.overlap and may_go_on(self.clocks, worker, self.staleness, under_way):
                    found += self._go([worker])
        return found

    def _go(self, workers: Sequence[int]) -> list[Decision]:
        self._tasks.update(workers)
        return [Go(worker) for worker in workers]


def drawn_order(agreement: Consistency, num_updates: int, seed: int = 0) -> tuple[int, ...]:
    """The worker of each push in turn, until there are so many updates: of all that may push next, any. The agreement,
    which nobody has joined, is used up."""
    draw, found = random.Random(seed), list[int]()
    bases: dict[int, list[int]] = {worker: [] for worker in range(agreement.num_workers)}
    decisions = [decision for worker in bases for decision in agreement.join(worker)]
    while agreement.version < num_updates:
        for decision in decisions:
            if isinstance(decision, Go):
                bases[decision.worker].append(agreement.version)
        found.append(draw.choice([worker for worker, tasks in bases.items() if tasks]))
        decisions = agreement.push(Push(found[-1], bases[found[-1]].pop(0)))
    return tuple(found)
