"""Rules by which ranks decide, one action after the other, what a schedule with split backwards does, and a search
through them for the schedule that has the least bubble within a memory limit, for given times.

Two families of rules. Both respect a memory limit.

    alternating    Qi et al. 2024, "Zero Bubble Pipeline Parallelism", section 3.1. Before the first backward a rank
                   runs as many forwards as memory and the time that is left allow. Then a forward and a backward take
                   turns; a weight part fills a wait that is as long, and a shorter one if the rank would else become
                   the one that waits most, and runs where memory is needed. A rank is always one forward ahead of the
                   next, and may leave one out where it is two ahead
    in_time        in the order of time: a backward for inputs as soon as its gradient is there; else a forward, if
                   memory allows; else a weight part, which fills the wait

The search gives the paper's ZB-1p in the memory of 1F1B, and its ZB-2p in twice that.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from plait.errors import PlanError
from plait.schedule.action_builder import round_robin
from plait.spec.schedule import BACKWARD, FORWARD, WEIGHT, Action, Schedule

_FRACTIONS = (0.0, 0.1, 0.25, 0.5, 0.75, 1.0)  # of an action's time
_ROUNDING = 1e-9


@dataclass(frozen=True)
class StageSeconds:
    """Seconds of each part of a stage for one microbatch."""

    forward: float
    inputs: float
    weight: float

    def of(self, kind: str) -> float:
        """The seconds of one kind of action."""
        return {FORWARD: self.forward, BACKWARD: self.inputs, WEIGHT: self.weight}[kind]


@dataclass(frozen=True)
class ScheduleTask:
    """What a schedule is searched for: see `search_zero_bubble`."""

    stages: Sequence[StageSeconds]
    transfer: float
    num_micro: int
    limit: float
    kept: float


# The longest time of a rank from its first action to its last, and the actions.
TimedActions = tuple[float, list[list[Action]]]
ScheduleRules = Callable[[ScheduleTask], list[TimedActions]]


def alternating(task: ScheduleTask) -> list[TimedActions]:
    """The schedules that the rules of Qi et al. give, one for each combination of three choices.

    The choices are whether the first backward may wait for one forward more, whether forwards are left out, and whether
    weight parts fill all waits."""
    return [_Alternating(task, *choices).run() for choices in itertools.product((True, False), repeat=3)]


def in_time(task: ScheduleTask) -> list[TimedActions]:
    """The schedules of ranks that decide in the order of time, one for each pair of two limits.

    The limits are how short a wait may be that a weight part fills, and how much a forward may delay a backward."""
    return [_InTime(task, wait, delay).run() for wait, delay in itertools.product(_FRACTIONS, _FRACTIONS)]


class _Alternating:
    """One run of the rules: all ranks do their next forward, first to last, then their next backward, last to first."""

    def __init__(self, task: ScheduleTask, late: bool, skips: bool, fills: bool) -> None:
        self.task, self.late, self.skips, self.fills = task, late, skips, fills
        num = len(task.stages)
        self.actions: list[list[Action]] = [[] for _ in range(num)]
        self.forwards: list[list[float]] = [[] for _ in range(num)]  # when each one ended
        self.backwards: list[list[float]] = [[] for _ in range(num)]
        self.weights = [0] * num
        self.begin = [0.0] * num
        self.free = [0.0] * num
        self.held = [0.0] * num
        self.waited = [0.0] * num

    def run(self) -> TimedActions:
        ranks = range(len(self.task.stages))
        self._warm_up()
        for _ in range(1, self.task.num_micro):
            wanted = [len(self.forwards[rank]) < self.task.num_micro and not self._leaves_out(rank) for rank in ranks]
            for rank in reversed(ranks[:-1]):
                wanted[rank] = wanted[rank] and wanted[rank + 1]
            for rank in ranks:
                if wanted[rank]:
                    self._make_room(rank)
                    self._fill_wait(rank, FORWARD)
                    self._act(rank, FORWARD)
            for rank in reversed(ranks):
                self._fill_wait(rank, BACKWARD)
                if rank == 0 and len(self.forwards[0]) == self.task.num_micro:
                    self._finish_weights(rank)  # nobody waits for the first rank any more
                self._act(rank, BACKWARD)
        for rank in ranks:
            self._finish_weights(rank)
        return max(end - begin for begin, end in zip(self.begin, self.free, strict=True)), self.actions

    def _warm_up(self) -> None:
        """The first forwards, and the first backward of each rank."""
        task, ranks = self.task, range(len(self.task.stages))
        for rank in ranks:
            self._act(rank, FORWARD)
        more = [0] * len(ranks)
        comes = self.free[-1] + task.stages[-1].inputs + task.transfer  # the gradient for the rank before
        for rank in reversed(ranks[:-1]):
            forward, time, held = task.stages[rank].forward, self.free[rank], self.held[rank]
            while 1 + more[rank] < task.num_micro and held + 1 <= task.limit + _ROUNDING:
                if time >= comes if self.late else time + forward > comes:
                    break
                time, held, more[rank] = time + forward, held + 1, more[rank] + 1
            comes = max(time, comes) + task.stages[rank].inputs + task.transfer
        for rank in ranks[1:]:
            while 0 < more[rank] >= more[rank - 1] and 1 + more[rank] < task.num_micro:
                more[rank] -= 1
        for rank in ranks:
            for _ in range(more[rank]):
                self._act(rank, FORWARD)
        for rank in reversed(ranks):
            self._act(rank, BACKWARD)

    def _leaves_out(self, rank: int) -> bool:
        """Whether a rank that is two forwards ahead of the next leaves one out: it would delay the next backward, or
        the wait is not longer than what the rank that waits most has waited."""
        if not self.skips or rank + 1 == len(self.task.stages):
            return False
        if len(self.forwards[rank]) < len(self.forwards[rank + 1]) + 2:
            return False
        after, stage = self.task.stages[rank + 1], self.task.stages[rank]
        comes = self.free[rank + 1] + after.forward + after.inputs + self.task.transfer
        if self.free[rank] >= comes:
            return True
        beyond = self.held[rank] + 1 - self.task.limit - _ROUNDING
        owed = len(self.backwards[rank]) - self.weights[rank]
        first = min(math.ceil(beyond / self.task.kept), owed) if beyond > 0 and self.task.kept else 0
        if self.free[rank] + stage.forward + first * stage.weight <= comes:
            return False
        return comes - self.free[rank] <= max(self.waited) - self.waited[rank]

    def _owes(self, rank: int) -> bool:
        return self.weights[rank] < len(self.backwards[rank])

    def _make_room(self, rank: int) -> None:
        """Run weight parts until memory has room for a forward. There is room once none is left: a rank has as many
        forwards without a backward as it began with, less one."""
        while self.held[rank] + 1 > self.task.limit + _ROUNDING:
            assert self._owes(rank)
            self._act(rank, WEIGHT)

    def _fill_wait(self, rank: int, kind: str) -> None:
        """Run weight parts until what the next action of a kind needs has come."""
        comes, each = self._comes(rank, kind), self.task.stages[rank].weight
        while self._owes(rank) and self.free[rank] + each <= comes:
            self._act(rank, WEIGHT)
        wait = comes - self.free[rank]
        if wait > 0 and self._owes(rank) and (self.fills or self.waited[rank] + wait > max(self.waited)):
            self._act(rank, WEIGHT)

    def _finish_weights(self, rank: int) -> None:
        while self._owes(rank):
            self._act(rank, WEIGHT)

    def _comes(self, rank: int, kind: str) -> float:
        """When what the next action of a kind needs from another rank is there."""
        if kind == FORWARD and rank > 0:
            return self.forwards[rank - 1][len(self.forwards[rank])] + self.task.transfer
        if kind == BACKWARD and rank + 1 < len(self.task.stages):
            return self.backwards[rank + 1][len(self.backwards[rank])] + self.task.transfer
        return 0.0

    def _act(self, rank: int, kind: str) -> None:
        start = max(self.free[rank], self._comes(rank, kind))
        if self.actions[rank]:
            self.waited[rank] += start - self.free[rank]
        else:
            self.begin[rank] = start
        end = self.free[rank] = start + self.task.stages[rank].of(kind)
        if kind == WEIGHT:
            micro, change = self.weights[rank], -self.task.kept
            self.weights[rank] += 1
        else:
            ends = self.forwards[rank] if kind == FORWARD else self.backwards[rank]
            micro, change = len(ends), 1.0 if kind == FORWARD else self.task.kept - 1.0
            ends.append(end)
        self.held[rank] += change
        self.actions[rank].append(Action(kind, micro))


class _InTime:
    """One greedy run, from the first forward to the last weight part."""

    def __init__(self, task: ScheduleTask, wait: float, delay: float) -> None:
        self.stages, self.transfer, self.num_micro = task.stages, task.transfer, task.num_micro
        self.limit, self.kept, self.wait, self.delay = task.limit, task.kept, wait, delay
        num = len(task.stages)
        self.actions: list[list[Action]] = [[] for _ in range(num)]
        self.begin = [math.inf] * num
        self.free = [0.0] * num
        self.forwards, self.backwards, self.weights = [0] * num, [0] * num, [0] * num
        # When the input of each forward, and the gradient of each backward, is on a rank; infinite if not known yet.
        self.arrives = [[0.0 if rank == 0 else math.inf] * task.num_micro for rank in range(num)]
        self.returns = [[math.inf] * task.num_micro for _ in range(num)]

    def run(self) -> TimedActions:
        """The longest time of a rank from its first action to its last, and the actions."""
        queue = [(0.0, rank) for rank in range(len(self.stages))]
        while queue:
            time, rank = heapq.heappop(queue)
            if self.weights[rank] == self.num_micro:
                continue
            again = self._decide(rank, time)
            heapq.heappush(queue, (again, rank))
        return max(end - begin for begin, end in zip(self.begin, self.free, strict=True)), self.actions

    def _decide(self, rank: int, time: float) -> float:
        """Let a rank that is free at `time` act or wait. Returns when it decides again."""
        stage = self.stages[rank]
        done, back = self.forwards[rank], self.backwards[rank]
        comes = self.returns[rank][back] if back < self.num_micro else math.inf
        if comes <= time:
            return self._act(rank, BACKWARD, time, stage.inputs)
        held = done - back + (back - self.weights[rank]) * self.kept
        room = done < self.num_micro and held + 1 <= self.limit
        input_comes = self.arrives[rank][done] if room else math.inf
        owed = self.weights[rank] < back
        if input_comes <= time and time + self.delay * stage.forward <= comes:
            return self._act(rank, FORWARD, time, stage.forward)
        soon = comes if input_comes <= time else min(comes, input_comes)
        if owed and soon - time >= self.wait * stage.weight:
            return self._act(rank, WEIGHT, time, stage.weight)
        if math.isinf(soon):  # a neighbour decides first
            others = [self.free[other] for other in (rank - 1, rank + 1) if 0 <= other < len(self.stages)]
            return max(min((each for each in others if each > time), default=time + self._tick), time + self._tick)
        return soon

    @property
    def _tick(self) -> float:
        """How long a rank waits before it asks again, if it cannot know when its next input comes."""
        parts = [part for stage in self.stages for part in (stage.forward, stage.inputs, stage.weight) if part > 0]
        return min(parts, default=1.0) / 8

    def _act(self, rank: int, kind: str, time: float, seconds: float) -> float:
        end = time + seconds
        self.begin[rank] = min(self.begin[rank], time)
        self.free[rank] = end
        last = len(self.stages) - 1
        if kind == FORWARD:
            micro = self.forwards[rank]
            self.forwards[rank] += 1
            if rank == last:
                self.returns[rank][micro] = end
            else:
                self.arrives[rank + 1][micro] = end + self.transfer
        elif kind == BACKWARD:
            micro = self.backwards[rank]
            self.backwards[rank] += 1
            if rank > 0:
                self.returns[rank - 1][micro] = end + self.transfer
        else:
            micro = self.weights[rank]
            self.weights[rank] += 1
        self.actions[rank].append(Action(kind, micro))
        return end


def search_zero_bubble(
    stages: Sequence[StageSeconds],
    transfer: float,
    num_micro: int,
    limit: float,
    kept: float = 1.0,
    rules: Sequence[ScheduleRules] = (alternating, in_time),
) -> Schedule:
    """The schedule with the least cost that is found.

    Args:
        stages: the times of each stage; a rank has one.
        transfer: seconds between neighbours.
        num_micro: microbatches.
        limit: the most that a rank holds, in activations of microbatches.
        kept: the fraction of a microbatch's activations that stays from its backward for inputs to its weight part.
        rules: by which ranks decide; `(alternating,)` are those of the paper.

    Raises PlanError for a limit below the number of ranks, and for times that are negative or not finite.
    """
    if limit < len(stages):
        raise PlanError(f"a limit of {limit} microbatches for {len(stages)} ranks; give {len(stages)} or more")
    times = [part for stage in stages for part in (stage.forward, stage.inputs, stage.weight)]
    if not all(0 <= part < math.inf for part in (*times, transfer)):
        raise PlanError(f"stages of {times} seconds and transfers of {transfer}; each is 0 or more, and finite")
    task = ScheduleTask(stages, transfer, num_micro, limit, kept)
    found = [each for one in rules for each in one(task)]
    _, actions = min(found, key=lambda each: each[0])
    return Schedule("zb-search", num_micro, round_robin(len(stages)), tuple(map(tuple, actions)))
