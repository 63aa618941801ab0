"""The time of a schedule of a chain of stages, without its trace, for searches that need thousands of them.

schedule_times(name, num_ranks, num_micro, chunks, costs) -> ScheduleTimes

The numbers are those of `simulate` (cost/simulate.py), to the last digit. The order in which actions can run depends on
the schedule alone, and is kept; each set of costs then takes one pass over it.
"""

from __future__ import annotations

from collections import defaultdict, deque
from functools import lru_cache
from typing import NamedTuple

from plait.cost.costs import Costs
from plait.schedule.check import check_runs
from plait.schedule.families import make_schedule
from plait.schedule.readiness import chain
from plait.spec.action import BACKWARD, FORWARD, WEIGHT

_WHOLE = "whole"  # a backward that is not split


class ScheduleTimes(NamedTuple):
    """Seconds of a step, those in which the busiest rank computes, and the bytes of activations of the fullest."""

    seconds: float
    busy: float
    kept: float


class _Cell(NamedTuple):
    """A computation: its rank, kind and stage, and the place in the order of what it needs of another stage."""

    rank: int
    kind: str
    stage: int
    needs: int = -1


@lru_cache(maxsize=256)
def _order(name: str, num_ranks: int, num_micro: int, chunks: int | None) -> tuple[_Cell, ...]:
    """Computations, each after all that it needs. Raises ScheduleError for a deadlock."""
    schedule = make_schedule(name, num_ranks, num_micro, chunks)
    last = schedule.num_stages - 1
    todo = [
        [(action.kind, rank_stages[action.chunk], action.micro) for action in actions if action.computes]
        for rank_stages, actions in zip(schedule.stages, schedule.ranks, strict=True)
    ]
    split = {(stage, micro) for cells in todo for kind, stage, micro in cells if kind == WEIGHT}
    at, places, found = [0] * num_ranks, dict[tuple[str, int, int | None], int](), list[_Cell]()
    waiting: dict[tuple[str, int, int | None], list[int]] = defaultdict(list)
    ready = deque(range(num_ranks))
    while ready:
        rank = ready.popleft()
        while at[rank] < len(todo[rank]):
            kind, stage, micro = cell = todo[rank][at[rank]]
            before = stage - 1 if kind == FORWARD else stage + 1
            needs = -1
            if kind != WEIGHT and 0 <= before <= last:
                if (kind, before, micro) not in places:
                    waiting[kind, before, micro].append(rank)
                    break
                needs = places[kind, before, micro]
            places[cell] = len(found)
            whole = kind == BACKWARD and (stage, micro) not in split
            found.append(_Cell(rank, _WHOLE if whole else kind, stage, needs))
            at[rank] += 1
            ready.extend(waiting.pop(cell, ()))
    if len(found) < sum(map(len, todo)):
        check_runs(schedule, chain(schedule.num_stages))
    return tuple(found)


def schedule_times(name: str, num_ranks: int, num_micro: int, chunks: int | None, costs: Costs) -> ScheduleTimes:
    """The times of a schedule by its name. `chunks` is the number of stages on each rank; None is the schedule's
    default. Raises PlanError for a schedule that does not exist."""
    order, stages = _order(name, num_ranks, num_micro, chunks), range(costs.num_stages)
    seconds = {
        FORWARD: costs.forward,
        BACKWARD: costs.backward,
        WEIGHT: costs.weight,
        _WHOLE: tuple(map(sum, zip(costs.backward, costs.weight, strict=True))),
    }
    activations = [costs.of("activation_bytes", stage) for stage in stages]
    later = [float(costs.kept_for_weight(stage)) for stage in stages]
    change = {
        FORWARD: activations,
        BACKWARD: [rest - whole for whole, rest in zip(activations, later, strict=True)],
        WEIGHT: [-rest for rest in later],
        _WHOLE: [-whole for whole in activations],
    }
    arrives = {FORWARD: [costs.transfer(max(stage - 1, 0), stage) for stage in stages]}
    arrives[BACKWARD] = arrives[_WHOLE] = [costs.transfer(min(stage + 1, stages[-1]), stage) for stage in stages]
    free, busy, held = [0.0] * num_ranks, [0.0] * num_ranks, [0.0] * num_ranks
    most, ends = 0.0, list[float]()
    for rank, kind, stage, needs in order:
        start, takes = free[rank], seconds[kind][stage]
        if needs >= 0:
            comes = ends[needs] if order[needs].rank == rank else ends[needs] + arrives[kind][stage]
            start = max(start, comes)
        end = free[rank] = start + takes
        ends.append(end)
        busy[rank] += takes
        held[rank] += change[kind][stage]
        most = max(most, held[rank])
    return ScheduleTimes(max(free), max(busy), most)
