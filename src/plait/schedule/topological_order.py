"""The topological order of a schedule's actions, and what follows from it: deadlocks and start times."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from plait.schedule.readiness import Edges, RankAction, needs
from plait.spec.action import BACKWARD, SEND, Action
from plait.spec.schedule import Schedule


@dataclass(frozen=True)
class TopologicalOrder:
    """An order in which ranks can run their actions, up to the actions at which ranks are stuck.

    Attributes:
        order: actions with their ranks, each after all that it needs.
        stopped: for each rank, how many of its actions are in `order`.
        waits: for each rank that is stuck, the action that it waits for.
        needs: for each action that a rank came to, what it needs.
    """

    order: tuple[RankAction, ...]
    stopped: tuple[int, ...]
    waits: dict[int, RankAction]
    needs: dict[RankAction, tuple[RankAction, ...]]


@lru_cache(maxsize=8)
def topological_order(schedule: Schedule, edges: Edges) -> TopologicalOrder:
    """Advance every rank past each action whose needs are done, until no rank can go on."""
    at, done, order = [0] * schedule.num_ranks, set[RankAction](), list[RankAction]()
    waiting: dict[RankAction, list[int]] = defaultdict(list)
    waits: dict[int, RankAction] = {}
    needed: dict[RankAction, tuple[RankAction, ...]] = {}
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
    return TopologicalOrder(tuple(order), tuple(at), waits, needed)


Duration = Callable[[int, Action], float]
Delay = Callable[[int, Action, int, Action], float]  # of a value: producing rank and action, consuming rank and action


def start_times(
    num_ranks: int, found: TopologicalOrder, duration: Duration, delay: Delay
) -> dict[RankAction, tuple[float, float]]:
    """Start and end of each action, as early as possible. A value of another rank arrives `delay` after its action."""
    free = [0.0] * num_ranks
    times: dict[RankAction, tuple[float, float]] = {}
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


def unit_steps(schedule: Schedule, edges: Edges) -> dict[RankAction, tuple[int, int]]:
    """Start and end of the actions that can run, if F, B and W each take 1, an unsplit backward 2, and all else 0."""

    def duration(rank: int, action: Action) -> float:
        whole = action.kind == BACKWARD and not schedule.splits(rank, action)
        return float(action.computes) + whole

    times = start_times(schedule.num_ranks, topological_order(schedule, edges), duration, lambda *_: 0.0)
    return {place: (round(start), round(end)) for place, (start, end) in times.items()}
