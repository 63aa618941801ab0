"""Stages of which some have several copies: microbatches take turns among them."""

from __future__ import annotations

from collections.abc import Sequence

from plait.errors import PlanError
from plait.schedule.families import make_schedule
from plait.spec.action import STEP, Action
from plait.spec.schedule import Schedule


def make_replicated(name: str, copies: Sequence[int], num_micro: int, chunks: int | None = None) -> Schedule:
    """The schedule `name` where place i of the pipeline is on copies[i] ranks: `[1, 2, 1]` is for a slow middle.

    Microbatch m goes to copy m % copies[i] of each place. (Narayanan et al. 2019, "PipeDream", section 3.2: 1F1B-RR.)
    The schedule is the one of as many ranks as there are altogether, of which a place has the list of its first, and
    each copy the part of that for its own microbatches: so a place runs ahead by as many microbatches as keep all
    ranks after it busy. Copies update once each of them has had its turn; under pipedream-2bw with all others.
    """
    if not copies or min(copies) < 1:
        raise PlanError(f"copies {list(copies)}: each place of a pipeline is on 1 rank or more")
    base = make_schedule(name, sum(copies), num_micro, chunks)
    places = [sum(copies[:i]) for i in range(len(copies))]
    numbers = {stage: i for i, stage in enumerate(sorted(stage for place in places for stage in base.stages[place]))}
    stages, ranks = [], []
    for place, number in zip(places, copies, strict=True):
        for copy in range(number):
            stages.append(tuple(numbers[stage] for stage in base.stages[place]))
            ranks.append(tuple(action for action in base.ranks[place] if _takes(base, action, copy, number)))
    return Schedule(name, num_micro, tuple(stages), tuple(ranks), base.vertical)


def _takes(schedule: Schedule, action: Action, copy: int, number: int) -> bool:
    assert action.micro is not None
    if action.kind == STEP:
        everyone = schedule.name == "pipedream-2bw" or action.micro == schedule.num_micro - 1
        return everyone or (action.micro + 1) % number == 0
    return action.micro % number == copy
