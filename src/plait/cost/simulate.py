"""Simulates a schedule: what each rank does and when, from the costs of stages and transfers.

    simulate(schedule, costs) -> Trace
    schedule_times(name, num_ranks, num_micro, chunks, costs) -> ScheduleTimes

Nothing is random and nothing is measured. A rank runs its actions in order, each as soon as its inputs are there. A
send takes none of the sending rank's time; the value arrives after the seconds of the transfer. A backward that is not
split takes the seconds of both its parts.

`schedule_times` gives the same numbers, to the last digit, for a chain of stages and without a trace, for searches that
need thousands of them: the order in which actions can run depends on the schedule alone, and is kept; each set of costs
then takes one pass over it.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import NamedTuple

from plait.cost.costs import Costs
from plait.errors import PlanError
from plait.schedule.check import check_runs
from plait.schedule.families import make_schedule
from plait.schedule.in_flight import microbatches_in_flight
from plait.schedule.readiness import Edges, RankAction, TopologicalOrder, chain, start_times, topological_order
from plait.spec.schedule import BACKWARD, FORWARD, REDUCE, SEND, STEP, WEIGHT, Action, Schedule
from plait.spec.trace import Sample, Span, Trace

_KINDS = {FORWARD: "forward", BACKWARD: "backward", WEIGHT: "weight", REDUCE: "reduce", STEP: "optimizer"}


def simulate(schedule: Schedule, costs: Costs, edges: Edges | None = None) -> Trace:
    """The trace of one step that starts at time 0. `edges` say which cells need which; by default stages are a chain.

    Memory counts the `state_bytes` of a rank's stages, and activations from the start of F to the end of B or W.
    Raises ScheduleError for a deadlock, and PlanError if the costs are of another number of stages.
    """
    if costs.num_stages != schedule.num_stages:
        raise PlanError(f"costs of {costs.num_stages} stages for the {schedule.num_stages} of {schedule.name}")
    edges = chain(schedule.num_stages) if edges is None else edges
    check_runs(schedule, edges)

    def duration(rank: int, action: Action) -> float:
        return _seconds(schedule, costs, rank, action)

    def delay(peer: int, producer: Action, rank: int, action: Action) -> float:
        if not action.computes:
            return 0.0
        return costs.transfer(schedule.stages[peer][producer.chunk], schedule.stages[rank][action.chunk])

    found = topological_order(schedule, edges)
    times = start_times(schedule.num_ranks, found, duration, delay)
    memory, in_flight = held(schedule, costs, times)
    return Trace(tuple(_spans(schedule, costs, found, times)), schedule.num_ranks, memory, in_flight)


def _seconds(schedule: Schedule, costs: Costs, rank: int, action: Action) -> float:
    if action.kind == STEP:
        return sum(costs.of("step", stage) for stage in schedule.stages[rank])
    stage = schedule.stages[rank][action.chunk] if action.kind in _KINDS else 0
    if action.kind == FORWARD:
        return costs.forward[stage]
    if action.kind == BACKWARD:
        return costs.backward[stage] + (0.0 if schedule.splits(rank, action) else costs.weight[stage])
    if action.kind == WEIGHT:
        return costs.weight[stage]
    return costs.of("reduce", stage) if action.kind == REDUCE else 0.0


def _spans(
    schedule: Schedule, costs: Costs, found: TopologicalOrder, times: dict[RankAction, tuple[float, float]]
) -> list[Span]:
    """Spans of actions, of waits, and of transfers, which overlap with actions."""
    spans: list[Span] = []
    sent: dict[tuple[RankAction, int], Span] = {}
    for rank, actions in enumerate(schedule.ranks):
        free = 0.0
        for action in actions:
            start, end = times[rank, action]
            if start > free:
                spans.append(Span(rank, "wait", f"wait for {action}", free, start, 0, action.micro, action.chunk))
            free = end
            if action.kind in _KINDS and (action.computes or end > start):
                spans.append(Span(rank, _KINDS[action.kind], str(action), start, end, 0, action.micro, action.chunk))
            for peer, made in found.needs[rank, action] if action.computes else ():
                if peer == rank:
                    continue
                producer = made.producer if made.kind == SEND else made
                stages = schedule.stages[peer][producer.chunk], schedule.stages[rank][action.chunk]
                left = times[peer, made][1]
                span = Span(
                    peer, "send", f"{producer}>{rank}", left, left + costs.transfer(*stages),
                    costs.bytes_between(*stages), producer.micro, producer.chunk,
                )  # fmt: skip
                before = sent.get(((peer, producer), rank))
                sent[(peer, producer), rank] = max(span, before or span, key=lambda each: (each.end, each.num_bytes))
    return spans + list(sent.values())


def held(
    schedule: Schedule,
    costs: Costs,
    times: Mapping[RankAction, tuple[float, float]],
    ranks: Iterable[int] | None = None,
) -> tuple[tuple[Sample, ...], tuple[Sample, ...]]:
    """Samples of the bytes held and of the microbatches in flight, from the times of actions. `ranks` defaults to all
    ranks."""
    memory: list[Sample] = []
    in_flight: list[Sample] = []
    for rank in range(schedule.num_ranks) if ranks is None else ranks:
        num_bytes = int(sum(costs.of("state_bytes", stage) for stage in schedule.stages[rank]))
        count = 0
        memory.append(Sample(rank, 0.0, num_bytes))
        in_flight.append(Sample(rank, 0.0, 0))
        for action, change in microbatches_in_flight(schedule, rank):
            stage = schedule.stages[rank][action.chunk]
            whole, kept = int(costs.of("activation_bytes", stage)), costs.kept_for_weight(stage)
            start, end = times[rank, action]
            time, count = end, count + change
            if action.kind == FORWARD:
                num_bytes, time = num_bytes + whole, start
                if schedule.forward_only:  # activations live only while the forward runs
                    memory.append(Sample(rank, start, num_bytes))
                    in_flight.append(Sample(rank, start, count))
                    num_bytes, count, time = num_bytes - whole, count - 1, end
            elif action.kind == BACKWARD:
                num_bytes -= whole if change else whole - kept
            else:
                num_bytes -= kept
            memory.append(Sample(rank, time, num_bytes))
            in_flight.append(Sample(rank, time, count))
    return tuple(memory), tuple(in_flight)


_WHOLE = "whole"  # a backward that is not split


class ScheduleTimes(NamedTuple):
    """Seconds of a step, those in which the busiest rank computes, and the bytes of activations of the fullest."""

    seconds: float
    busy: float
    kept: float


class _Cell(NamedTuple):
    """A computation: its rank, kind and stage, and the place in the order of what it needs of another stage."""

    rank: int
    kind: str
    stage: int
    needs: int = -1


@lru_cache(maxsize=256)
def _order(name: str, num_ranks: int, num_micro: int, chunks: int | None) -> tuple[_Cell, ...]:
    """Computations, each after all that it needs. Raises ScheduleError for a deadlock."""
    schedule = make_schedule(name, num_ranks, num_micro, chunks)
    last = schedule.num_stages - 1
    todo = [
        [(action.kind, rank_stages[action.chunk], action.micro) for action in actions if action.computes]
        for rank_stages, actions in zip(schedule.stages, schedule.ranks, strict=True)
    ]
    split = {(stage, micro) for cells in todo for kind, stage, micro in cells if kind == WEIGHT}
    at, places, found = [0] * num_ranks, dict[tuple[str, int, int | None], int](), list[_Cell]()
    waiting: dict[tuple[str, int, int | None], list[int]] = defaultdict(list)
    ready = deque(range(num_ranks))
    while ready:
        rank = ready.popleft()
        while at[rank] < len(todo[rank]):
            kind, stage, micro = cell = todo[rank][at[rank]]
            before = stage - 1 if kind == FORWARD else stage + 1
            needs = -1
            if kind != WEIGHT and 0 <= before <= last:
                if (kind, before, micro) not in places:
                    waiting[kind, before, micro].append(rank)
                    break
                needs = places[kind, before, micro]
            places[cell] = len(found)
            whole = kind == BACKWARD and (stage, micro) not in split
            found.append(_Cell(rank, _WHOLE if whole else kind, stage, needs))
            at[rank] += 1
            ready.extend(waiting.pop(cell, ()))
    if len(found) < sum(map(len, todo)):
        check_runs(schedule, chain(schedule.num_stages))
    return tuple(found)


def schedule_times(name: str, num_ranks: int, num_micro: int, chunks: int | None, costs: Costs) -> ScheduleTimes:
    """The times of a schedule by its name. `chunks` is the number of stages on each rank; None is the schedule's
    default. Raises PlanError for a schedule that does not exist."""
    order, stages = _order(name, num_ranks, num_micro, chunks), range(costs.num_stages)
    seconds = {
        FORWARD: costs.forward,
        BACKWARD: costs.backward,
        WEIGHT: costs.weight,
        _WHOLE: tuple(map(sum, zip(costs.backward, costs.weight, strict=True))),
    }
    activations = [costs.of("activation_bytes", stage) for stage in stages]
    later = [float(costs.kept_for_weight(stage)) for stage in stages]
    change = {
        FORWARD: activations,
        BACKWARD: [rest - whole for whole, rest in zip(activations, later, strict=True)],
        WEIGHT: [-rest for rest in later],
        _WHOLE: [-whole for whole in activations],
    }
    arrives = {FORWARD: [costs.transfer(max(stage - 1, 0), stage) for stage in stages]}
    arrives[BACKWARD] = arrives[_WHOLE] = [costs.transfer(min(stage + 1, stages[-1]), stage) for stage in stages]
    free, busy, held = [0.0] * num_ranks, [0.0] * num_ranks, [0.0] * num_ranks
    most, ends = 0.0, list[float]()
    for rank, kind, stage, needs in order:
        start, takes = free[rank], seconds[kind][stage]
        if needs >= 0:
            comes = ends[needs] if order[needs].rank == rank else ends[needs] + arrives[kind][stage]
            start = max(start, comes)
        end = free[rank] = start + takes
        ends.append(end)
        busy[rank] += takes
        held[rank] += change[kind][stage]
        most = max(most, held[rank])
    return ScheduleTimes(max(free), max(busy), most)
