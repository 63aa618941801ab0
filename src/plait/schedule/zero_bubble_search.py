"""A search for a schedule with split backwards that has the least bubble within a memory limit, for given times.

(Qi et al. 2024, "Zero Bubble Pipeline Parallelism", section 3.1: ZB-1p in the memory of 1F1B, ZB-2p in twice that.)
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from plait.errors import PlanError
from plait.schedule.action_builder import round_robin
from plait.schedule.zero_bubble_rules import ScheduleRules, ScheduleTask, StageSeconds, alternating, in_time
from plait.spec.schedule import Schedule


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
