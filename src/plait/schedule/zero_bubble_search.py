"""A search for a schedule with split backwards that has the least bubble within a memory limit, for given times.

(Qi et al. 2024, "Zero Bubble Pipeline Parallelism", section 3.1, gives the idea and other rules.) Ranks decide one
action after the other, in the order of time: a backward for inputs as soon as its gradient is there; else a forward, if
memory allows; else a weight part, which fills the wait. How short a wait may be that a weight part fills, and whether a
forward may delay a backward that is about to come, are the two numbers that are searched.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from plait.errors import PlanError
from plait.schedule.action_builder import round_robin
from plait.spec.action import BACKWARD, FORWARD, WEIGHT, Action
from plait.spec.schedule import Schedule

_FRACTIONS = (0.0, 0.1, 0.25, 0.5, 0.75, 1.0)  # of an action's time


@dataclass(frozen=True)
class StageSeconds:
    """Seconds of each part of a stage for one microbatch."""

    forward: float
    inputs: float
    weight: float


def search_zero_bubble(
    stages: Sequence[StageSeconds], transfer: float, num_micro: int, limit: float, kept: float = 1.0
) -> Schedule:
    """The schedule with the least cost that is found.

    Args:
        stages: the times of each stage; a rank has one.
        transfer: seconds between neighbours.
        num_micro: microbatches.
        limit: the most that a rank holds, in activations of microbatches.
        kept: the fraction of a microbatch's activations that stays from its backward for inputs to its weight part.

    Raises PlanError for a limit below the number of ranks, and for times that are negative or not finite.
    """
    if limit < len(stages):
        raise PlanError(f"a limit of {limit} microbatches for {len(stages)} ranks; give {len(stages)} or more")
    times = [part for stage in stages for part in (stage.forward, stage.inputs, stage.weight)]
    if not all(0 <= part < math.inf for part in (*times, transfer)):
        raise PlanError(f"stages of {times} seconds and transfers of {transfer}; each is 0 or more, and finite")
    found = [
        _Run(stages, transfer, num_micro, limit, kept, wait, delay).run()
        for wait, delay in itertools.product(_FRACTIONS, _FRACTIONS)
    ]
    _, actions = min(found, key=lambda each: each[0])
    return Schedule("zb-search", num_micro, round_robin(len(stages)), tuple(map(tuple, actions)))


class _Run:
    """One greedy run, from the first forward to the last weight part."""

    def __init__(
        self,
        stages: Sequence[StageSeconds],
        transfer: float,
        num_micro: int,
        limit: float,
        kept: float,
        wait: float,
        delay: float,
    ) -> None:
        self.stages, self.transfer, self.num_micro, self.limit, self.kept = stages, transfer, num_micro, limit, kept
        self.wait, self.delay = wait, delay
        num = len(stages)
        self.actions: list[list[Action]] = [[] for _ in range(num)]
        self.begin = [math.inf] * num
        self.free = [0.0] * num
        self.forwards, self.backwards, self.weights = [0] * num, [0] * num, [0] * num
        # When the input of each forward, and the gradient of each backward, is on a rank; infinite if not known yet.
        self.arrives = [[0.0 if rank == 0 else math.inf] * num_micro for rank in range(num)]
        self.returns = [[math.inf] * num_micro for _ in range(num)]

    def run(self) -> tuple[float, list[list[Action]]]:
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
