"""The schedules by name: each a function of the number of ranks and microbatches, and of chunks if it has a choice."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass

from plait.errors import PlanError, Refusal
from plait.schedule.families.asynchronous import pipedream, pipedream_2bw, pipedream_vertical
from plait.schedule.families.dualpipe import dualpipe_v
from plait.schedule.families.looped import interleaved, looped_bfs
from plait.schedule.families.plain import forward_only, gpipe, naive, one_f_one_b
from plait.schedule.families.zero_bubble import zb_h1, zb_h2, zb_v
from plait.spec.schedule import Schedule


@dataclass(frozen=True)
class ScheduleFamily:
    """A schedule for any size. `chunks` is how many stages a rank gets; with `any_chunks`, unless told otherwise."""

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
ASYNCHRONOUS = ("pipedream", "pipedream-vertical", "pipedream-2bw")


def make_schedule(name: str, num_ranks: int, num_micro: int, chunks: int | None = None) -> Schedule:
    """The schedule of that name for `num_ranks` ranks and `num_micro` microbatches, of any number.

    `chunks` is the number of stages on each rank; None is what the schedule has by itself. PlanError when there is no
    such schedule (with near matches), or when it does not come with that number of chunks.
    """
    family = find_family(name)
    if num_ranks < 1 or num_micro < 1:
        raise PlanError(f"{num_ranks} ranks and {num_micro} microbatches: a schedule needs 1 or more of each")
    if chunks is None:
        chunks = family.chunks
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
    """The family of that name; PlanError names those that are near."""
    if name not in FAMILIES:
        near = difflib.get_close_matches(name.lower(), FAMILIES, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(near)}? " if near else ""
        raise PlanError(f"there is no schedule {name!r}; {hint}the schedules are {', '.join(FAMILIES)}")
    return FAMILIES[name]
