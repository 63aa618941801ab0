"""Walk through a schedule as its ranks would: in which order all can be done, where ranks get stuck, and when."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from plait.schedule.readiness import Edges, Place, needs
from plait.spec.action import BACKWARD, SEND, Action
from plait.spec.schedule import Schedule


@dataclass(frozen=True)
class Walk:
    """`order` is one in which each action comes after all that it needs; `waits` what each stuck rank waits for."""

    order: tuple[Place, ...]
    stopped: tuple[int, ...]  # of each rank: how many of its actions were done
    waits: dict[int, Place]
    needs: dict[Place, tuple[Place, ...]]  # of each action that a rank came to


@lru_cache(maxsize=8)
def walk(schedule: Schedule, edges: Edges) -> Walk:
    """Do every rank's actions in the order of its list, each once what it needs is done, until no rank can go on."""
    at, done, order = [0] * schedule.num_ranks, set[Place](), list[Place]()
    waiting: dict[Place, list[int]] = defaultdict(list)
    waits: dict[int, Place] = {}
    needed: dict[Place, tuple[Place, ...]] = {}
    ready = deque(range(schedule.num_ranks))
    while ready:
        rank = ready.popleft()
        actions = schedule.ranks[rank]
        waits.pop(rank, None)
        while at[rank] < len(actions):
            place = (rank, actions[at[rank]])
            if place not in needed:
                needed[place] = needs(schedule, *place, edges)
            missing = next((each for each in needed[place] if each not in done), None)
            if missing is not None:
                waiting[missing].append(rank)
                waits[rank] = missing
                break
            at[rank] += 1
            done.add(place)
            order.append(place)
            ready.extend(waiting.pop(place, ()))
    return Walk(tuple(order), tuple(at), waits, needed)


Duration = Callable[[int, Action], float]
Delay = Callable[[int, Action, int, Action], float]  # of a value: rank and action that make it, that need it


def when(num_ranks: int, found: Walk, duration: Duration, delay: Delay) -> dict[Place, tuple[float, float]]:
    """Start and end of all that a walk found, each as early as can be; what another rank made comes `delay` later."""
    free = [0.0] * num_ranks
    times: dict[Place, tuple[float, float]] = {}
    for rank, action in found.order:
        start = free[rank]
        for peer, made in found.needs[rank, action]:
            arrives = times[peer, made][1]
            if peer != rank:
                producer = made.producer if made.kind == SEND else made
                arrives += delay(peer, producer, rank, action)
            start = max(start, arrives)
        times[rank, action] = (start, start + duration(rank, action))
        free[rank] = times[rank, action][1]
    return times


def unit_steps(schedule: Schedule, edges: Edges) -> dict[Place, tuple[int, int]]:
    """Times when forward, and each part of backward, takes 1 and all else nothing; as far as the schedule gets."""

    def duration(rank: int, action: Action) -> float:
        whole = action.kind == BACKWARD and not schedule.splits(rank, action)
        return float(action.computes) + whole

    times = when(schedule.num_ranks, walk(schedule, edges), duration, lambda *_: 0.0)
    return {place: (round(start), round(end)) for place, (start, end) in times.items()}
