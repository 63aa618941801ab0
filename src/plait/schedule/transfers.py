"""Add the communication to a schedule of computations: SEND, RECV, REDUCE; and a STEP at the end."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace

from plait.schedule.readiness import Edges, RankAction, needs
from plait.spec.schedule import RECV, REDUCE, SEND, STEP, Action, Schedule


def add_transfers(schedule: Schedule, edges: Edges) -> Schedule:
    """Put a SEND after each producer, for each rank that needs its result, and a RECV before the first consumer.

    A RECV stands one computation before its first consumer, so that the value can arrive meanwhile. It stands earlier
    where that is needed to keep the transfers between two ranks in the same order on both, so that a link can be a
    queue. A schedule that has transfers is returned unchanged.
    """
    if schedule.has_transfers:
        return schedule
    first_use = _first_uses(schedule, edges)
    after: dict[RankAction, list[Action]] = defaultdict(list)
    links: dict[tuple[int, int], list[Action]] = defaultdict(list)  # the results sent from rank to rank, in order
    for (source, made), uses in first_use.items():
        for target in sorted(uses):
            assert made.micro is not None
            after[source, made].append(Action(SEND, made.micro, made.chunk, target, made.kind))
    for source, actions in enumerate(schedule.ranks):
        for action in actions:
            for send in after.get((source, action), ()):
                assert send.peer is not None
                links[source, send.peer].append(action)
    before: dict[tuple[int, int], list[Action]] = defaultdict(list)  # by rank and position in its list
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
    """Append to every rank a REDUCE for each chunk whose parameters other ranks have too, and one STEP.

    `shared` are groups of stages with parameters in common, such as tied weights; replicas of a stage share all of
    them. Every rank has its REDUCEs in the order of the stages, so that no ranks wait for each other. A forward-only
    schedule has nothing to update, and one with STEPs of its own keeps them.
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


def _first_uses(schedule: Schedule, edges: Edges) -> dict[RankAction, dict[int, int]]:
    """For each result that other ranks need, the position of its first consumer in each of these ranks' lists."""
    found: dict[RankAction, dict[int, int]] = defaultdict(dict)
    for rank, actions in enumerate(schedule.ranks):
        for position, action in enumerate(actions):
            if action.computes:
                for peer, made in needs(schedule, rank, action, edges):
                    if peer != rank:
                        found[peer, made].setdefault(rank, position)
    return found
