"""The microbatches and messages that are in flight on a rank.

A microbatch is in flight in a chunk from its forward to the end of its backward, of both parts if it is split. A
message is in flight from its SEND until it is certain to be received. Which receives are certain to be complete when a
rank comes to an action follows from the order of actions and transfers, whatever the speed of the ranks (Lamport's
happened-before relation, CACM 1978, by vector clocks).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from plait.schedule.readiness import Edges, RankAction, topological_order
from plait.spec.schedule import BACKWARD, FORWARD, SEND, WEIGHT, Action, Schedule


def microbatches_in_flight(schedule: Schedule, rank: int, last: str = WEIGHT) -> Iterator[tuple[Action, int]]:
    """Yield every F, B and W of a rank, and by how many it changes the number of microbatches in flight: 1, 0 or -1.

    With `last` B, they are in flight until the first part of a backward that is split.
    """
    for action in schedule.ranks[rank]:
        if action.computes:
            end = last if schedule.splits(rank, action) else BACKWARD
            yield action, (action.kind == FORWARD) - (action.kind == end)


def most_microbatches_in_flight(schedule: Schedule, rank: int, chunk: int, last: str = WEIGHT) -> int:
    """The most microbatches in flight in a chunk of a rank at a time; `last` as above."""
    now = most = 0
    for action, change in microbatches_in_flight(schedule, rank, last):
        now += change if action.chunk == chunk else 0
        most = max(most, now)
    return most


def completed_sends(schedule: Schedule, edges: Edges, rank: int) -> dict[Action, tuple[Action, ...]]:
    """For each SEND of a rank, in order, the earlier SENDs that are certain to be complete when the rank comes to it.

    Each SEND is listed as complete once. A receiver completes a SEND with the first action that needs its value. The
    schedule has been checked, and has its transfers.
    """
    found = topological_order(schedule, edges)
    clocks = [[0] * schedule.num_ranks for _ in range(schedule.num_ranks)]  # per rank: actions known done, by rank
    after: dict[RankAction, tuple[int, ...]] = {}
    at_send: dict[Action, tuple[int, ...]] = {}  # this rank's clock when it comes to each of its SENDs
    receivers: dict[Action, tuple[int, int]] = {}  # rank, and position in its list, at which each SEND is complete
    for peer, action in found.order:
        clock = clocks[peer]
        for made in found.needs[peer, action]:
            clock[:] = map(max, clock, after[made])
            if made[0] == rank != peer and made[1].kind == SEND:
                receivers.setdefault(made[1], (peer, clock[peer] + 1))
        if peer == rank and action.kind == SEND:
            at_send[action] = tuple(clock)
        clock[peer] += 1
        after[peer, action] = tuple(clock)
    completed: dict[Action, tuple[Action, ...]] = {}
    in_flight: list[Action] = []
    for action, clock_then in at_send.items():
        completed[action] = tuple(each for each in in_flight if _is_complete(receivers.get(each), clock_then))
        in_flight = [each for each in in_flight if each not in completed[action]] + [action]
    return completed


def _is_complete(receiver: tuple[int, int] | None, clock: tuple[int, ...]) -> bool:
    return receiver is not None and clock[receiver[0]] >= receiver[1]


def most_bytes_in_flight(schedule: Schedule, edges: Edges, rank: int, num_bytes: Callable[[Action], int]) -> int:
    """The most bytes that the SENDs of a rank may have in flight. `num_bytes` gives the bytes of a SEND."""
    now = most = 0
    for action, completed in completed_sends(schedule, edges, rank).items():
        now += num_bytes(action) - sum(map(num_bytes, completed))
        most = max(most, now)
    return most
