"""Consistency models of parameter servers: which gradients make an update, and which workers may go on.

asynchronous     every push is an update of its own, and its worker goes on at once
bounded          the same, but a worker that has pushed `bound` times more often than the slowest waits for it (stale
                 synchronous parallel: Ho et al. 2013, "More Effective Distributed ML via a Stale Synchronous Parallel
                 Parameter Server")
synchronous      an update is the mean of one push of every worker, computed on the same values; all go on together
with backups     an update is the mean of the first pushes of all but `backup` workers; later pushes are dropped (Chen
                 et al. 2016, "Revisiting Distributed Synchronous SGD")

In the first two modes a worker may have `overlap` tasks besides the one that it computes, so that its push and its next
pull overlap with computation: gradient k is computed on values that include its own push k - 1 - overlap.

Every decision follows from the order of the events alone. Nothing here communicates or reads a clock.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from plait.errors import PlanError


@dataclass(frozen=True)
class Push:
    """A worker's gradient. `base` is the version of the parameters that it was computed on, and `weight` its weight in
    a mean."""

    worker: int
    base: int
    weight: float = 1.0


@dataclass(frozen=True)
class Commit:
    """An update of the servers' values.

    Attributes:
        number: which update of the run it is, from 1.
        members: the workers whose gradients it sums.
        shares: the factor of each member's gradient; they sum to 1.
        staleness: for each member, the updates made since the values that its gradient was computed on.
        ends_step: whether it is the last update of a step.
    """

    number: int
    members: tuple[int, ...]
    shares: tuple[float, ...]
    staleness: tuple[int, ...]
    ends_step: bool


@dataclass(frozen=True)
class Go:
    """The worker may pull the newest values for one more task."""

    worker: int


@dataclass(frozen=True)
class Late:
    """The worker's gradient is dropped: the update of version `base` was made without it."""

    worker: int
    base: int


@dataclass(frozen=True)
class Refuse:
    """The worker's push is invalid, for the reason `why`."""

    worker: int
    why: str


Decision = Commit | Go | Late | Refuse


def may_go_on(clocks: Mapping[int, int], worker: int, bound: int | None, in_flight: int = 0) -> bool:
    """Whether a worker, its tasks in flight included, is at most `bound` pushes ahead of the slowest.

    `clocks` are the pushes that each worker has made; a `bound` of None is no bound."""
    return bound is None or clocks[worker] + in_flight - min(clocks.values()) <= bound


def num_needed(num_members: int, backup: int) -> int:
    """The number of pushes that make a synchronous update."""
    return max(1, num_members - backup)


def shares_of(weights: Sequence[float]) -> tuple[float, ...]:
    """The factor of each gradient in the weighted mean; equal factors if all weights are 0."""
    total = sum(weights)
    return tuple(w / total for w in weights) if total else (1 / len(weights),) * len(weights)


@dataclass
class Consistency:
    """The state machine that turns each event of a run into decisions.

    Attributes:
        num_workers: the number of workers that the run is for.
        staleness: None is asynchronous, 0 synchronous, any other number the bound.
        backup: in the synchronous mode, the number of workers whose pushes an update does not wait for.
        version: updates made so far.
        order: the worker of each push in turn, to repeat a run. A push before its turn waits; after the end of `order`
            pushes are taken as they arrive.
        started: whether workers may begin before `num_workers` of them have joined.
        overlap: tasks that a worker may have besides the one it computes; 0 in the synchronous mode.
        clocks: for each member, the number of its pushes that were taken.
    """

    num_workers: int
    staleness: int | None = None
    backup: int = 0
    version: int = 0
    order: Sequence[int] = ()
    started: bool = False
    overlap: int = 0
    clocks: dict[int, int] = field(default_factory=dict)
    _tasks: Counter[int] = field(default_factory=Counter)  # for each member, tasks without a push so far
    _arrived: dict[int, Push] = field(default_factory=dict)  # pushes for the next synchronous update
    _early: list[Push] = field(default_factory=list)  # pushes whose turn in `order` has not come
    _taken: int = 0

    @property
    def synchronous(self) -> bool:
        return self.staleness == 0

    @property
    def updates_per_step(self) -> int:
        """The updates of a step, which has one push of every worker: 1 if they make one update, else one each."""
        return 1 if self.synchronous else self.num_workers

    def join(self, worker: int) -> list[Decision]:
        """Add a worker without a task; its clock begins at that of the slowest."""
        self.clocks.setdefault(worker, min(self.clocks.values(), default=0))
        self._tasks[worker] = 0
        if self.started:
            return self._begun([worker])
        if len(self.clocks) < self.num_workers:
            return []
        self.started = True
        return self._begun(sorted(self.clocks))

    def adopt(self, worker: int) -> None:
        """Add a worker that already has its tasks, from the coordinator before this one."""
        self.clocks.setdefault(worker, min(self.clocks.values(), default=0))
        self._tasks[worker] = 1 + self.overlap

    def leave(self, worker: int) -> list[Decision]:
        """Remove a worker, and drop its pushes that are not used yet."""
        if self.clocks.pop(worker, None) is None:
            return []
        self._tasks.pop(worker, None)
        self._arrived.pop(worker, None)
        self._early = [push for push in self._early if push.worker != worker]
        return [*self._step_if_complete(), *self._released(), *self._in_order()]

    def push(self, push: Push) -> list[Decision]:
        """Take a gradient that has arrived."""
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
        """Take the pushes whose turn has come."""
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
        """Raise PlanError if the push whose turn it is can never come."""
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
        """Let the workers go on that no longer have to wait."""
        return [] if self.synchronous or not self.started else self._begun(sorted(self.clocks))

    def _begun(self, workers: Sequence[int]) -> list[Decision]:
        """Give each of these workers in turn the tasks that it may have."""
        found: list[Decision] = []
        early = Counter(push.worker for push in self._early)
        for _ in range(1 + self.overlap):
            for worker in workers:
                in_flight = self._tasks[worker] + early[worker]
                if in_flight <= self.overlap and may_go_on(self.clocks, worker, self.staleness, in_flight):
                    found += self._go([worker])
        return found

    def _go(self, workers: Sequence[int]) -> list[Decision]:
        self._tasks.update(workers)
        return [Go(worker) for worker in workers]


def drawn_order(consistency: Consistency, num_updates: int, seed: int = 0) -> tuple[int, ...]:
    """A random order of pushes that make `num_updates` updates, as the worker of each push.

    Each push is drawn among the workers that may push next. `consistency` must have no members; the call changes it.
    """
    draw, found = random.Random(seed), list[int]()
    bases: dict[int, list[int]] = {worker: [] for worker in range(consistency.num_workers)}
    decisions = [decision for worker in bases for decision in consistency.join(worker)]
    while consistency.version < num_updates:
        for decision in decisions:
            if isinstance(decision, Go):
                bases[decision.worker].append(consistency.version)
        found.append(draw.choice([worker for worker, tasks in bases.items() if tasks]))
        decisions = consistency.push(Push(found[-1], bases[found[-1]].pop(0)))
    return tuple(found)
