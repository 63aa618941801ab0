"""How much may be under way at a time: sent by a rank, and not surely taken by its receiver yet.

What is surely done when a rank comes to an action follows from what waits for what (Lamport's happened-before, by
vector clocks; CACM 1978), whatever the speed of the ranks.
"""

from __future__ import annotations

from collections.abc import Callable

from plait.schedule.readiness import Edges, Place
from plait.schedule.topological_order import walk
from plait.spec.action import SEND, Action
from plait.spec.schedule import Schedule


def surely_taken(schedule: Schedule, edges: Edges, rank: int) -> dict[Action, tuple[Action, ...]]:
    """Of each SEND of a rank, in order, the earlier ones that are taken for sure when the rank comes to it, each named
    once. A receiver takes a message with the first action that needs it. The schedule has been checked, and has its
    transfers."""
    found = walk(schedule, edges)
    done = [[0] * schedule.num_ranks for _ in range(schedule.num_ranks)]  # of each rank: what it knows that others did
    after: dict[Place, tuple[int, ...]] = {}
    known: dict[Action, tuple[int, ...]] = {}  # what this rank knows when it comes to each of its SENDs
    takers: dict[Action, tuple[int, int]] = {}  # by whom, and when in its list, each SEND of this rank is taken
    for peer, action in found.order:
        clock = done[peer]
        for made in found.needs[peer, action]:
            clock[:] = map(max, clock, after[made])
            if made[0] == rank != peer and made[1].kind == SEND:
                takers.setdefault(made[1], (peer, clock[peer] + 1))
        if peer == rank and action.kind == SEND:
            known[action] = tuple(clock)
        clock[peer] += 1
        after[peer, action] = tuple(clock)
    taken: dict[Action, tuple[Action, ...]] = {}
    under_way: list[Action] = []
    for action, clock_then in known.items():
        taken[action] = tuple(each for each in under_way if _is_taken(takers.get(each), clock_then))
        under_way = [each for each in under_way if each not in taken[action]] + [action]
    return taken


def _is_taken(taker: tuple[int, int] | None, known: tuple[int, ...]) -> bool:
    return taker is not None and known[taker[0]] >= taker[1]


def most_under_way(schedule: Schedule, edges: Edges, rank: int, num_bytes: Callable[[Action], int]) -> int:
    """The most bytes that the SENDs of a rank may have under way. Arguments as surely_taken."""
    now = most = 0
    for action, taken in surely_taken(schedule, edges, rank).items():
        now += num_bytes(action) - sum(map(num_bytes, taken))
        most = max(most, now)
    return most
