"""The pipeline schedules, by name.

A schedule is a function of the number of ranks and the number of microbatches, and some also of the number of chunks.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from plait.errors import PlanError, Refusal
from plait.schedule.families.asynchronous import pipedream, pipedream_2bw, pipedream_vertical
from plait.schedule.families.split_backward import dualpipe_v, zb_h1, zb_h2, zb_v
from plait.schedule.families.whole_backward import forward_only, gpipe, interleaved, looped_bfs, naive, one_f_one_b
from plait.spec.schedule import STEP, Action, Schedule


@dataclass(frozen=True)
class ScheduleFamily:
    """A named schedule.

    Attributes:
        make: a function of the number of ranks, the number of microbatches and, with `any_chunks`, of chunks.
        chunks: stages on each rank; with `any_chunks`, their number by default.
        any_chunks: whether the number of chunks can be chosen.
    """

    make: Callable[..., Schedule]
    chunks: int = 1
    any_chunks: bool = False


FAMILIES: dict[str, ScheduleFamily] = {
    "naive": ScheduleFamily(naive),
    "gpipe": ScheduleFamily(gpipe),
    "1f1b": ScheduleFamily(one_f_one_b),
    "interleaved": ScheduleFamily(interleaved, 2, any_chunks=True),
    "looped-bfs": ScheduleFamily(looped_bfs, 2, any_chunks=True),
    "zb-h1": ScheduleFamily(zb_h1),
    "zb-h2": ScheduleFamily(zb_h2),
    "zb-v": ScheduleFamily(zb_v, 2),
    "dualpipe-v": ScheduleFamily(dualpipe_v, 2),
    "forward-only": ScheduleFamily(forward_only, 1, any_chunks=True),
    "pipedream": ScheduleFamily(pipedream),
    "pipedream-vertical": ScheduleFamily(pipedream_vertical),
    "pipedream-2bw": ScheduleFamily(pipedream_2bw),
}


_MOST_PAIRS = 500_000  # of a stage and a microbatch, whose actions take a minute


def make_schedule(name: str, num_ranks: int, num_micro: int, chunks: int | None = None) -> Schedule:
    """The schedule `name` for `num_ranks` ranks and `num_micro` microbatches.

    `chunks` is the number of stages on each rank; None is the schedule's default. Raises PlanError, with near matches,
    for an unknown name, for a number of chunks that the schedule does not have, and for too many actions.
    """
    family = find_family(name)
    if num_ranks < 1 or num_micro < 1:
        raise PlanError(f"{num_ranks} ranks and {num_micro} microbatches: a schedule needs 1 or more of each")
    if chunks is None:
        chunks = family.chunks
    if (pairs := num_ranks * chunks * num_micro) > _MOST_PAIRS:
        raise PlanError(
            Refusal(
                f"{num_ranks * chunks:,} stages and {num_micro:,} microbatches",
                f"a schedule has an action for each pair of them, which are {pairs:,}",
                f"take fewer, with {_MOST_PAIRS:,} pairs at most",
            )
        )
    if family.any_chunks and chunks >= 1:
        return family.make(num_ranks, num_micro, chunks)
    if chunks != family.chunks:
        others = [other for other, each in FAMILIES.items() if each.any_chunks and other != "forward-only"]
        if family.any_chunks:
            raise PlanError(f"chunks={chunks}: a rank has 1 chunk or more")
        why = f"the schedule {name} has {family.chunks} on each rank"
        instead = f"leave chunks out, or take {' or '.join(others)}, which have any number from 1 on"
        raise PlanError(Refusal(f"chunks={chunks}", why, instead))
    return family.make(num_ranks, num_micro)


def find_family(name: str) -> ScheduleFamily:
    """The family of that name. Raises PlanError, with near matches, for an unknown name."""
    if name not in FAMILIES:
        near = difflib.get_close_matches(name.lower(), FAMILIES, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(near)}? " if near else ""
        raise PlanError(f"there is no schedule {name!r}; {hint}the schedules are {', '.join(FAMILIES)}")
    return FAMILIES[name]


def make_replicated(name: str, copies: Sequence[int], num_micro: int, chunks: int | None = None) -> Schedule:
    """The schedule `name` with place i of the pipeline on copies[i] ranks: `[1, 2, 1]` suits a slow middle.

    Replica m % copies[i] of place i runs microbatch m (1F1B-RR: Narayanan et al. 2019, "PipeDream", section 3.2). The
    actions come from the schedule of sum(copies) ranks: a place takes those of the first of its ranks, and each replica
    keeps the ones of its own microbatches. So a place runs far enough ahead to keep all later ranks busy. Replicas
    update once each of them has had a microbatch; under pipedream-2bw they update with all other ranks.

    Raises PlanError for a number of replicas below 1.
    """
    if not copies or min(copies) < 1:
        raise PlanError(f"copies {list(copies)}: each place of a pipeline is on 1 rank or more")
    base = make_schedule(name, sum(copies), num_micro, chunks)
    places = [sum(copies[:i]) for i in range(len(copies))]
    numbers = {stage: i for i, stage in enumerate(sorted(stage for place in places for stage in base.stages[place]))}
    stages, ranks = [], []
    for place, number in zip(places, copies, strict=True):
        for replica in range(number):
            stages.append(tuple(numbers[stage] for stage in base.stages[place]))
            ranks.append(tuple(action for action in base.ranks[place] if _runs_on(base, action, replica, number)))
    return Schedule(name, num_micro, tuple(stages), tuple(ranks), base.vertical)


def _runs_on(schedule: Schedule, action: Action, replica: int, num_replicas: int) -> bool:
    """Whether this replica of a place runs an action of the place."""
    assert action.micro is not None
    if action.kind == STEP:
        all_update = schedule.name == "pipedream-2bw" or action.micro == schedule.num_micro - 1
        return all_update or (action.micro + 1) % num_replicas == 0
    return action.micro % num_replicas == replica
