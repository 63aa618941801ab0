"""The text of a case's plan: `PLAN @ pattern: layout; pattern: layout`, a schedule of the user's own as `./NAME`."""

from __future__ import annotations

import random
import re
from pathlib import Path

from plait.errors import PlaitError
from plait.schedule.check import check_schedule
from plait.schedule.families import make_schedule
from plait.spec.schedule import Schedule

OWN = re.compile(r"schedule=\./([\w-]+)~(\d+)")


def split(text: str) -> tuple[str, dict[str, str]]:
    """The plan, and its layouts by hand."""
    plan, _, rest = text.partition(" @ ")
    pairs = [each.partition(": ") for each in rest.split("; ") if each]
    return plan, {pattern: layout for pattern, _, layout in pairs}


def join(plan: str, layouts: dict[str, str]) -> str:
    """What `split` takes apart."""
    return plan + (" @ " + "; ".join(f"{p}: {layout}" for p, layout in layouts.items()) if layouts else "")


def own_schedule(plan: str) -> str | None:
    """The text of the schedule that a plan has as `schedule=./NAME~SEED`: of that family, a few actions in another
    order. None where the plan has none, or the family no such sizes."""
    found = OWN.search(plan)
    sizes = {key: int(value) for key, value in re.findall(r"(pipeline|micro|chunks)=(\d+)", plan)}
    if found is None:
        return None
    try:
        schedule = make_schedule(found[1], sizes.get("pipeline", 1), sizes.get("micro", 1), sizes.get("chunks"))
    except PlaitError:
        return None
    rng = random.Random(found[2])
    for _ in range(12):
        ranks = [list(actions) for actions in schedule.ranks]
        actions = rng.choice(ranks)
        place = rng.randrange(max(len(actions) - 1, 1))
        actions[place : place + 2] = reversed(actions[place : place + 2])
        other = Schedule(schedule.name, schedule.num_micro, schedule.stages, tuple(tuple(each) for each in ranks))
        try:
            check_schedule(other)
        except PlaitError:
            continue
        schedule = other
    return str(schedule)


def with_file(plan: str, folder: Path) -> str:
    """The plan with its own schedule, if it has one, in a file of the folder."""
    text, found = own_schedule(plan), OWN.search(plan)
    if text is None or found is None:
        return plan
    path = folder / f"{found[1]}-{found[2]}.txt"
    path.write_text(text)
    return plan.replace(found[0], f"schedule={path}")
