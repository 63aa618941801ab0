"""Add to a schedule of computations what moves between ranks: SEND, RECV, REDUCE; and STEP at the end."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace

from plait.schedule.readiness import Edges, Place, needs
from plait.spec.action import RECV, REDUCE, SEND, STEP, Action
from plait.spec.schedule import Schedule


def add_transfers(schedule: Schedule, edges: Edges) -> Schedule:
    """Put a SEND right after each producer, one for each rank that needs its result, and the RECV before the consumer.

    A RECV stands one computation earlier than its first consumer, so that the value can arrive meanwhile, or earlier
    still where that keeps what goes from one rank to another in the same order on both: a link may then be a queue.
    A schedule that has transfers of its own is left as it is.
    """
    if schedule.has_transfers:
        return schedule
    first_use = _first_uses(schedule, edges)
    after: dict[Place, list[Action]] = defaultdict(list)
    links: dict[tuple[int, int], list[Action]] = defaultdict(list)  # what goes over each, in the order of sending
    for (source, made), uses in first_use.items():
        for target in sorted(uses):
            assert made.micro is not None
            after[source, made].append(Action(SEND, made.micro, made.chunk, target, made.kind))
    for source, actions in enumerate(schedule.ranks):
        for action in actions:
            for send in after.get((source, action), ()):
                assert send.peer is not None
                links[source, send.peer].append(action)
    before: dict[tuple[int, int], list[Action]] = defaultdict(list)  # rank and position in its list
    for (source, target), made_there in sorted(links.items()):
        latest = len(schedule.ranks[target])
        posts = []
        for made in reversed(made_there):
            latest = min(latest, max(first_use[source, made][target] - 1, 0))
            posts.append((latest, made))
        for position, made in reversed(posts):
            before[target, position].append(Action(RECV, made.micro, made.chunk, source, made.kind))
    ranks = []
    for rank, actions in enumerate(schedule.ranks):
        found: list[Action] = []
        for position, action in enumerate(actions):
            found += [*before.get((rank, position), ()), action, *after.get((rank, action), ())]
        ranks.append(tuple(found))
    return replace(schedule, ranks=tuple(ranks))


def add_updates(schedule: Schedule, edges: Edges, shared: Iterable[Iterable[int]] = ()) -> Schedule:
    """Put a REDUCE of each chunk whose gradients other ranks have too, and one STEP, at the end of every rank.

    `shared` are groups of stages with parameters in common, such as tied weights; the copies of a replicated stage
    share all. REDUCEs stand in the order of the stages' groups on every rank, so that no ranks wait for each other.
    A schedule without backward has nothing to update; one with STEPs of its own keeps them.
    """
    if schedule.forward_only:
        return schedule
    groups = [set(group) for group in shared]
    many = {stage for group in groups for stage in group if _num_ranks(schedule, group) > 1}
    many |= {stage for stage in range(schedule.num_stages) if len(schedule.holders(stage)) > 1}
    ranks = []
    for rank, actions in enumerate(schedule.ranks):
        chunks = sorted(range(len(schedule.stages[rank])), key=lambda chunk: schedule.stages[rank][chunk])
        reduces = [Action(REDUCE, chunk=chunk) for chunk in chunks if schedule.stages[rank][chunk] in many]
        if any(action.kind == STEP for action in actions):
            ranks.append(actions)
        else:
            present = [action for action in reduces if action not in actions]
            ranks.append((*actions, *present, Action(STEP)))
    return replace(schedule, ranks=tuple(ranks))


def _num_ranks(schedule: Schedule, group: set[int]) -> int:
    return len({rank for stage in group for rank, _ in schedule.holders(stage)})


def _first_uses(schedule: Schedule, edges: Edges) -> dict[Place, dict[int, int]]:
    """Of each result that other ranks need: the position in each of these ranks' lists where it is needed first."""
    found: dict[Place, dict[int, int]] = defaultdict(dict)
    for rank, actions in enumerate(schedule.ranks):
        for position, action in enumerate(actions):
            if action.computes:
                for peer, made in needs(schedule, rank, action, edges):
                    if peer != rank:
                        found[peer, made].setdefault(rank, position)
    return found
