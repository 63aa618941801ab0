"""Measures the costs of a schedule's stages from spans, and predicts from them the trace of every rank of a run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from statistics import median

from plait.cost.costs import Costs
from plait.cost.simulate import held, simulate
from plait.schedule.readiness import Edges, needs
from plait.spec.schedule import BACKWARD, FORWARD, SEND, STEP, WEIGHT, Action, Schedule
from plait.spec.trace import COMPUTE_KINDS, NEXT_BATCH, Sample, Span, Trace

_Peers = Callable[[int], Sequence[int]]  # from a rank to the ranks of its pipeline, by their place in it


def measure_costs(
    steps: Iterable[Trace], schedule: Schedule, edges: Edges, places: Sequence[int], pipeline_of: _Peers, given: Costs
) -> Costs:
    """The costs of stages: medians over microbatches, steps and ranks.

    Args:
        steps: traces of steps; spans may nest.
        schedule: the schedule that ran.
        edges: which cells need which.
        places: the place in the pipeline of every rank.
        pipeline_of: from a rank to the ranks of its pipeline, by place.
        given: costs whose bytes are kept.

    The time to send a result counts as part of computing it, because sends take no time in the simulator.
    `communication` is the time from the end of a send to the end of a wait that began before it.
    """
    seconds: dict[tuple[str, int], list[float]] = defaultdict(list)  # by kind and stage; "whole": an unsplit backward
    delays: list[float] = []
    reduces: dict[int, list[float]] = defaultdict(list)  # by stage
    updates: dict[int, list[float]] = defaultdict(list)  # by place
    for trace in steps:
        cells: dict[tuple[int, str], float] = defaultdict(float)
        update: dict[int, float] = defaultdict(float)
        sent: dict[tuple[int, str], float] = {}
        for span in trace.spans:
            if span.kind in COMPUTE_KINDS:
                cells[span.rank, span.name] += span.seconds
            elif span.kind == "send":
                cells[span.rank, str(Action.parse(span.name).producer)] += span.seconds
                sent[span.rank, span.name] = span.end
            elif span.kind == "optimizer":
                update[span.rank] += span.seconds
            elif span.kind == "reduce" and span.chunk is not None:
                reduces[schedule.stages[places[span.rank]][span.chunk]].append(span.seconds)
        for (rank, name), value in cells.items():
            action = Action.parse(name)
            whole = action.kind == BACKWARD and not schedule.splits(places[rank], action)
            kind = "whole" if whole else action.kind
            seconds[kind, schedule.stages[places[rank]][action.chunk]].append(value)
        for rank, value in update.items():
            num_updates = sum(action.kind == STEP for action in schedule.ranks[places[rank]])
            updates[places[rank]].append(value / max(num_updates, 1))
        for span in trace.spans:
            if span.kind == "wait" and span.micro is not None:
                consumer, peers = Action.parse(span.name), pipeline_of(span.rank)
                ends = [
                    sent.get((peers[place], str(made)), span.start)
                    for place, made in needs(schedule, places[span.rank], consumer, edges)
                    if made.kind == SEND
                ]
                if ends and max(ends) > span.start:
                    delays.append(max(span.end - max(ends), 0.0))
    return _costs(schedule, seconds, delays, reduces, updates, given)


def _costs(
    schedule: Schedule,
    seconds: dict[tuple[str, int], list[float]],
    delays: list[float],
    reduces: dict[int, list[float]],
    updates: dict[int, list[float]],
    given: Costs,
) -> Costs:
    stages = range(schedule.num_stages)

    def middle(kind: str, stage: int) -> float:
        return median(seconds.get((kind, stage)) or [0.0])

    backward, weight = [], []
    for stage in stages:
        whole, part = middle("whole", stage), middle(BACKWARD, stage)
        backward.append(part if (BACKWARD, stage) in seconds else whole)
        weight.append(middle(WEIGHT, stage) if (BACKWARD, stage) in seconds else 0.0)
    steps = [0.0] * schedule.num_stages
    for place, values in updates.items():
        for stage in schedule.stages[place]:
            steps[stage] = median(values) / len(schedule.stages[place])
    return replace(
        given,
        forward=tuple(middle(FORWARD, stage) for stage in stages),
        backward=tuple(backward),
        weight=tuple(weight),
        communication=median(delays) if delays else 0.0,
        latency=0.0,
        bytes_per_second=float("inf"),
        reduce=tuple(median(reduces.get(stage) or [0.0]) for stage in stages),
        step=tuple(steps),
    )


def predict(schedule: Schedule, edges: Edges, costs: Costs, places: Sequence[int], data: float = 0.0) -> Trace:
    """The simulated trace of every rank of a run.

    `places` are the places of the ranks in their pipelines. All ranks first wait `data` seconds for the batch.
    """
    trace = simulate(schedule, costs, edges).shifted(data)
    spans: list[Span] = []
    memory: list[Sample] = []
    in_flight: list[Sample] = []
    by_place: dict[int, tuple[list[Sample], list[Sample]]] = defaultdict(lambda: ([], []))
    for kind, samples in enumerate((trace.memory, trace.in_flight)):
        for sample in samples:
            by_place[sample.rank][kind].append(sample)
    for rank, place in enumerate(places):
        if data:
            spans.append(Span(rank, NEXT_BATCH, "next", 0.0, data))
        spans += [replace(span, rank=rank) for span in trace.of_rank(place)]
        memory += [replace(sample, rank=rank) for sample in by_place[place][0]]
        in_flight += [replace(sample, rank=rank) for sample in by_place[place][1]]
    return Trace(tuple(spans), len(places), tuple(memory), tuple(in_flight))


def with_held(trace: Trace, schedule: Schedule, costs: Costs, places: Sequence[int]) -> Trace:
    """A measured trace with samples of activation bytes, computed from `costs`, and of microbatches in flight."""
    memory: list[Sample] = []
    in_flight: list[Sample] = []
    for rank, place in enumerate(places):
        times: dict[tuple[int, Action], tuple[float, float]] = {}
        for span in trace.of_rank(rank):
            if span.kind in COMPUTE_KINDS:
                key = place, Action.parse(span.name)
                start, end = times.get(key, (span.start, span.end))
                times[key] = min(start, span.start), max(end, span.end)
        if all((place, action) in times for action in schedule.ranks[place] if action.computes):
            bytes_held, count = held(schedule, costs, times, [place])
            memory += [replace(sample, rank=rank) for sample in bytes_held]
            in_flight += [replace(sample, rank=rank) for sample in count]
    return replace(trace, memory=tuple(memory), in_flight=tuple(in_flight))
