"""The dependencies of actions: the one rule that the checker, the simulator and the executor share; and the topological
order of a schedule's actions, with what follows from it, deadlocks and start times.

A cell is a pair (kind, stage): ("F", 2) is the forward of stage 2. An edge is a pair of cells (producer, consumer), for
the same microbatch. A chain has F0 -> F1 -> ... and ... B1 -> B0; a skip connection from stage 0 to stage 3 adds
F0 -> F3 and B3 -> B0. That a stage's B needs its F, and W its B, holds without an edge.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache

from plait.spec.schedule import BACKWARD, FORWARD, RECV, REDUCE, SEND, STEP, WEIGHT, Action, Schedule, cell

Cell = tuple[str, int]
Edges = frozenset[tuple[Cell, Cell]]
RankAction = tuple[int, Action]  # an action and the rank that does it


def chain(num_stages: int, skips: Iterable[tuple[int, int]] = ()) -> Edges:
    """The edges of consecutive stages; each pair in `skips` is joined directly too, forward and backward."""
    pairs = [*((stage, stage + 1) for stage in range(num_stages - 1)), *skips]
    forward = {((FORWARD, a), (FORWARD, b)) for a, b in pairs}
    return frozenset(forward | {((BACKWARD, b), (BACKWARD, a)) for a, b in pairs})


@lru_cache(maxsize=64)
def producers(edges: Edges) -> Mapping[Cell, tuple[Cell, ...]]:
    """For each cell, the cells that it needs, except itself."""
    found: dict[Cell, list[Cell]] = defaultdict(list)
    for producer, consumer in sorted(edges):
        if producer != consumer:
            found[consumer].append(producer)
    return {consumer: tuple(cells) for consumer, cells in found.items()}


def place_of(schedule: Schedule, of: Cell, micro: int) -> RankAction:
    """The rank and action of a cell for a microbatch. The W of a backward that is not split is its B."""
    kind, stage = of
    rank, chunk = schedule.where(stage, micro)
    if kind == WEIGHT:
        return rank, schedule.last_backward(rank, micro, chunk)
    return rank, cell(kind, micro, chunk)


def needs(schedule: Schedule, rank: int, action: Action, edges: Edges) -> tuple[RankAction, ...]:
    """The actions, with their ranks, that must be done before `rank` may run `action`, besides earlier ones on `rank`.

    A value from another rank needs the SEND there and the RECV here, if the schedule has transfers. A RECV is posted at
    once and needs nothing; its consumer waits for it. REDUCE needs the backwards of its stage on all ranks that have
    it, and those of stages with parameters in common, which are edges to ("REDUCE", stage). STEP needs the REDUCEs and
    the backwards of its rank; a STEP with a number needs the backwards of that microbatch only, because the checker
    makes sure that earlier ones precede it.
    """
    if action.kind == SEND:
        return ((rank, action.producer),)
    if action.kind == REDUCE:
        stage = schedule.stages[rank][action.chunk]
        sharing = {stage, *(other for _, other in producers(edges).get((REDUCE, stage), ()))}
        holders = [holder for other in sorted(sharing) for holder in schedule.holders(other)]
        return tuple(place for holder, chunk in holders for place in _backwards(schedule, holder, {chunk}))
    if action.kind == STEP:
        chunks = range(len(schedule.stages[rank]))
        if action.micro is not None:
            own = ((rank, schedule.last_backward(rank, action.micro, chunk)) for chunk in chunks)
            return tuple(place for place in own if schedule.has(*place))
        reduced = [(rank, each) for each in schedule.ranks[rank] if each.kind == REDUCE]
        return (*_backwards(schedule, rank, set(chunks)), *reduced)
    if not action.computes:
        return ()
    assert action.micro is not None
    stage, micro = schedule.stages[rank][action.chunk], action.micro
    found: dict[RankAction, None] = {}
    if action.kind != FORWARD:
        before = FORWARD if action.kind == BACKWARD else BACKWARD
        found[rank, cell(before, micro, action.chunk)] = None
    cells = producers(edges).get((action.kind, stage), ())
    if action.kind == BACKWARD and not schedule.splits(rank, action):
        cells = (*cells, *producers(edges).get((WEIGHT, stage), ()))
    for producer in cells:
        peer, made = place_of(schedule, producer, micro)
        if peer == rank:
            if made != action:
                found[peer, made] = None
            continue
        if schedule.has_transfers and schedule.has(rank, Action(RECV, micro, made.chunk, peer, made.kind)):
            found[rank, Action(RECV, micro, made.chunk, peer, made.kind)] = None
            found[peer, Action(SEND, micro, made.chunk, rank, made.kind)] = None
        else:
            found[peer, made] = None
    return tuple(found)


def shared(groups: Iterable[Iterable[int]]) -> Edges:
    """The edges that make each REDUCE need the backwards of all stages in its group, which have parameters in
    common."""
    pairs = {(a, b) for group in map(tuple, groups) for a in group for b in group}
    return frozenset(((WEIGHT, a), (REDUCE, b)) for a, b in pairs)


def _backwards(schedule: Schedule, rank: int, chunks: set[int]) -> list[RankAction]:
    """The actions that complete the gradients of these chunks of a rank."""
    found = [each for each in schedule.ranks[rank] if each.kind == BACKWARD and each.chunk in chunks]
    return [(rank, schedule.last_backward(rank, each.micro, each.chunk)) for each in found if each.micro is not None]


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
