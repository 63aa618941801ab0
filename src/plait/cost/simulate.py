"""Simulates a schedule: what each rank does and when, from the costs of stages and transfers.

Nothing is random and nothing is measured. A rank runs its actions in order, each as soon as its inputs are there. A
send takes none of the sending rank's time; the value arrives after the seconds of the transfer. A backward that is not
split takes the seconds of both its parts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from plait.cost.costs import Costs
from plait.errors import PlanError
from plait.schedule.check import check_runs
from plait.schedule.in_flight import microbatches_in_flight
from plait.schedule.readiness import Edges, RankAction, chain
from plait.schedule.topological_order import TopologicalOrder, start_times, topological_order
from plait.spec.action import BACKWARD, FORWARD, REDUCE, SEND, STEP, WEIGHT, Action
from plait.spec.schedule import Schedule
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
