"""Simulates a step of a lowered program on a cluster: what a rank of each place of the pipeline does, and when.

A rank issues the calls of a graph in order, as the eager backend does. What it computes runs on one stream, the
collectives of each communicator on a stream of their own, copies to and from the host on another. A collective that a
call only begins runs beside what follows, and a wait ends when it does. Over a link that does not overlap, such as
memory that ranks share, the ranks themselves copy: a collective then takes their time where it is waited for.

All ranks at one place of the pipeline do the same, so that one of them stands for all.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from plait.cost.collective_time import CollectiveKind, collective_time, send_time
from plait.cost.op_time import CallTimes
from plait.cost.step_program import AxisCollective, CollectiveCall, CopyCall, OpCall, ProgramCall, StepProgram
from plait.errors import PlanError, Refusal
from plait.schedule.in_flight import microbatches_in_flight
from plait.schedule.readiness import Cell, RankAction, start_times, topological_order
from plait.schedule.shared_cores import shared_times
from plait.spec.cluster import Cluster
from plait.spec.mesh import Mesh
from plait.spec.schedule import BACKWARD, FORWARD, SEND, STEP, WEIGHT, Action, Schedule
from plait.spec.trace import NEXT_BATCH, Sample, Span, Trace

_KIND = {FORWARD: "forward", BACKWARD: "backward", WEIGHT: "weight"}
_SUMS = (CollectiveKind.ALL_REDUCE, CollectiveKind.REDUCE_SCATTER)


@dataclass(frozen=True)
class SimulatedProgram:
    """What a step takes.

    Attributes:
        seconds: from the start of a step to that of the next.
        trace: of one rank for each place along the pipeline.
        ranks: the rank of the mesh that each of these is.
        times: seconds of the slowest of them by what it does: compute, collectives that it waits for, bubble, update,
            host.
        sent: bytes that the rank that sends most sends in a step, by the level of the outermost link that they pass.
    """

    seconds: float
    trace: Trace
    ranks: tuple[int, ...]
    times: Mapping[str, float]
    sent: Mapping[str, float]


@dataclass(frozen=True)
class GraphTime:
    """The simulation of one graph: its seconds, those in which it computes, and its spans from time 0."""

    seconds: float
    computes: float
    spans: tuple[Span, ...]


def check_ranks(mesh: Mesh, cluster: Cluster) -> None:
    """Raise PlanError for a mesh with more ranks than the cluster has devices."""
    if mesh.size > cluster.num_devices:
        raise PlanError(
            Refusal(
                f"the plan has {mesh.size} ranks ({mesh.spread})",
                f"the cluster {cluster.name} has {cluster.num_devices} devices",
                "take a larger cluster, such as one named with a count, or a smaller plan",
            )
        )


class StepSimulator:
    """Simulates programs on one cluster.

    Raises PlanError for a mesh with more ranks than the cluster has devices.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self._times = CallTimes(cluster)
        self._collectives: dict[tuple[AxisCollective, int, int, int], float] = {}

    def simulate(self, program: StepProgram) -> SimulatedProgram:
        """The times of a step."""
        check_ranks(program.mesh, self.cluster)
        found = self._alone(program) if program.pipeline is None else self._piped(program)
        return replace(found, sent=self._most_sent(program))

    def graph(self, program: StepProgram, calls: Sequence[ProgramCall], place: int) -> GraphTime:
        """The time of a graph's calls on the rank at a place. In a pipeline it is at the speed of measured calls."""
        speed = 1.0
        if program.pipeline is None:
            speed = self.cluster.device.speed(min(program.mesh.size, self.cluster.node_size))
        return _Timeline(self, program, place, speed).run(calls)

    def collective_seconds(self, program: StepProgram, transfer: AxisCollective, place: int) -> float:
        """Seconds of a collective that all groups of its axis do at the same time."""
        size, stride = program.mesh.axis_size(transfer.axis), program.mesh.stride(transfer.axis)
        base = program.rank_of(place)
        base -= base // stride % size * stride
        key = (transfer, base, size, stride)
        if key not in self._collectives:
            group = range(base, base + size * stride, stride)
            whole = transfer.kind.whole_bytes(transfer.held, size)
            self._collectives[key] = collective_time(transfer.kind, whole, group, self.cluster)
        return self._collectives[key]

    def overlaps(self, program: StepProgram, axis: str, place: int) -> bool:
        """Whether ranks compute while collectives along an axis run."""
        return self.cluster.links[self._level(program, axis, place)].overlaps

    def _level(self, program: StepProgram, axis: str, place: int) -> int:
        size, stride = program.mesh.axis_size(axis), program.mesh.stride(axis)
        base = program.rank_of(place)
        base -= base // stride % size * stride
        return self.cluster.between(base, base + (size - 1) * stride)

    def copy_seconds(self, call: CopyCall) -> float:
        """Seconds of a copy between the device and its home."""
        host = self.cluster.host
        if host is None:
            raise PlanError(
                Refusal(
                    f"the plan copies to the {call.home}",
                    f"nothing is known of the hosts of the cluster {self.cluster.name}",
                    "give its description a [host] with disk_bandwidth and device_bandwidth",
                )
            )
        share = min(self.cluster.node_size, self.cluster.num_devices)
        bandwidth = host.device_bandwidth if call.home == "host" else host.disk_bandwidth / share
        return call.num_bytes / bandwidth if bandwidth else math.inf

    def _alone(self, program: StepProgram) -> SimulatedProgram:
        now, spans = self._begin(program)
        computes = busy = 0.0
        graphs = {name: self.graph(program, program.graphs[name], 0) for name in dict.fromkeys(program.micro_graphs)}
        for micro, name in enumerate(program.micro_graphs):
            graph = graphs[name]
            spans += [_moved(span, 0, now, micro) for span in graph.spans]
            now, busy, computes = now + graph.seconds, busy + graph.seconds, computes + graph.computes
        update = self.graph(program, program.updates[0], 0)
        spans += [_moved(span, 0, now, None) for span in update.spans]
        host = self.cluster.device.step_seconds
        times = {"compute": computes, "collectives": busy - computes, "update": update.seconds, "host": host}
        return SimulatedProgram(now + update.seconds + host, Trace(tuple(spans), 1), (0,), times, {})

    def _begin(self, program: StepProgram) -> tuple[float, list[Span]]:
        """The time at which the first graph begins, once the batch is on the device, and spans until then."""
        host = self.cluster.host
        if host is None or self.cluster.device.together:  # a rank on cores of the host reads the batch where it lies
            return 0.0, []
        seconds = program.batch_bytes / host.device_bandwidth if host.device_bandwidth else 0.0
        if not seconds:
            return 0.0, []
        return seconds, [Span(r, NEXT_BATCH, "batch", 0.0, seconds) for r in range(program.num_places)]

    def _piped(self, program: StepProgram) -> SimulatedProgram:
        pipeline = program.pipeline
        assert pipeline is not None
        schedule, (begin, spans) = pipeline.schedule, self._begin(program)
        work = self._work_of(program)
        delays = {place: self._message(program, *place) for place in pipeline.messages}
        overlaps = self.overlaps(program, pipeline.axis, 0)  # else the sender copies, and then the receiver
        found = topological_order(schedule, pipeline.edges)

        def duration(rank: int, action: Action) -> float:
            if action.kind == SEND:
                return 0.0 if overlaps else delays[rank, action] / 2
            return work[rank, action].seconds if (rank, action) in work else 0.0

        def delay(peer: int, producer: Action, rank: int, action: Action) -> float:
            if not action.computes:
                return 0.0
            send = Action(SEND, producer.micro, producer.chunk, rank, producer.kind)
            return delays.get((peer, send), 0.0) / (1 if overlaps else 2)

        if self.cluster.device.together:
            hosts = max(program.mesh.size / self.cluster.node_size, 1.0)
            each = program.mesh.size / schedule.num_ranks / hosts  # ranks of a host that a place stands for
            times = shared_times(schedule, found, duration, delay, lambda num: self.cluster.device.speed(num * each))
        else:
            times = start_times(schedule.num_ranks, found, duration, delay)
        spans += _schedule_spans(program, times, delays, begin)
        ends = [begin + max((times[rank, a][1] for a in actions), default=0.0)
                for rank, actions in enumerate(schedule.ranks)]  # fmt: skip
        last, updates = self._finish(program, ends, spans)
        busy, computes = [0.0] * schedule.num_ranks, [0.0] * schedule.num_ranks
        for (rank, _), one in work.items():
            busy[rank] += one.seconds
            computes[rank] += one.computes
        slowest = busy.index(max(busy))
        host = self.cluster.device.step_seconds
        share = {
            "compute": computes[slowest],
            "collectives": busy[slowest] - computes[slowest],
            "update": updates[slowest],
            "host": host,
        }
        share["bubble"] = max(last + host - sum(share.values()), 0.0)
        ranks = tuple(program.rank_of(place) for place in range(schedule.num_ranks))
        flying = tuple(_in_flight(schedule, times, begin))
        trace = Trace(tuple(spans), schedule.num_ranks, in_flight=flying)
        return SimulatedProgram(last + host, trace, ranks, share, {})

    def _finish(self, program: StepProgram, ends: Sequence[float], spans: list[Span]) -> tuple[float, list[float]]:
        """What follows a schedule whose ranks are done at `ends`: gradients of common parameters, losses and buffers
        are exchanged, then all update. Appends to `spans`. Returns the end, and the seconds of each rank's update."""
        pipeline = program.pipeline
        assert pipeline is not None
        done = list(ends)
        sharing = [rank for rank, num_bytes in enumerate(pipeline.exchanged) if num_bytes]
        for rank in sharing if len(sharing) > 1 else ():
            other = next(each for each in sharing if each != rank)
            num_bytes = pipeline.exchanged[rank]
            seconds = send_time(num_bytes, program.rank_of(rank), program.rank_of(other), self.cluster)
            start = max(ends[each] for each in sharing)
            spans.append(Span(rank, "reduce", "shared gradients", start, start + seconds, num_bytes))
            done[rank] = start + seconds
        meet, last, updates = max(done), max(done), []
        for rank in range(pipeline.schedule.num_ranks):
            if meet > done[rank]:
                spans.append(Span(rank, "wait", "wait for losses", done[rank], meet))
            now = meet
            for calls in (pipeline.after, () if pipeline.schedule.asynchronous else program.updates[rank]):
                graph = self.graph(program, calls, rank)
                spans += [_moved(span, rank, now, None) for span in graph.spans]
                now += graph.seconds
            updates.append(graph.seconds)
            last = max(last, now)
        return last, updates

    def _work_of(self, program: StepProgram) -> dict[RankAction, GraphTime]:
        """The time of each action that computes."""
        pipeline = program.pipeline
        assert pipeline is not None
        schedule = pipeline.schedule
        graphs: dict[tuple[str, int], GraphTime] = {}
        found: dict[RankAction, GraphTime] = {}
        for rank, actions in enumerate(schedule.ranks):
            counts: Counter[Cell] = Counter()
            for action in actions:
                if not action.computes:
                    continue
                stage = schedule.stages[rank][action.chunk]
                cells = [(action.kind, stage)]
                if action.kind == BACKWARD and not schedule.splits(rank, action):
                    cells.append((WEIGHT, stage))
                total = GraphTime(0.0, 0.0, ())
                for cell in cells:
                    micro_graphs = pipeline.micro_graphs.get((rank, cell))
                    if not micro_graphs:
                        continue
                    name = micro_graphs[counts[cell] % len(micro_graphs)]
                    counts[cell] += 1
                    if (name, rank) not in graphs:
                        graphs[name, rank] = self.graph(program, program.graphs[name], rank)
                    one = graphs[name, rank]
                    total = GraphTime(total.seconds + one.seconds, total.computes + one.computes, ())
                found[rank, action] = total
            for action in actions:
                if action.kind == STEP and action.micro is not None:
                    found[rank, action] = self.graph(program, program.updates[rank], rank)
        return found

    def _message(self, program: StepProgram, rank: int, action: Action) -> float:
        assert program.pipeline is not None and action.peer is not None
        here, there = program.rank_of(rank), program.rank_of(action.peer)
        num_bytes = program.pipeline.messages[rank, action]
        return send_time(num_bytes, here, there, self.cluster) if num_bytes else 0.0

    def _most_sent(self, program: StepProgram) -> dict[str, float]:
        """Bytes that a rank sends, by the level of the outermost link that they pass; of the place that sends most."""
        found: list[dict[str, float]] = []
        for place in range(program.num_places):
            sent: dict[str, float] = defaultdict(float)
            lists = [(program.graphs[name], count) for name, count in program.calls_of(place)]
            lists.append((program.updates[place], 1))
            if program.pipeline is not None:
                lists.append((program.pipeline.after, 1))
            for calls, count in lists:
                for transfer in _begun(calls):
                    size = program.mesh.axis_size(transfer.axis)
                    if size > 1:
                        level = self.cluster.links[self._level(program, transfer.axis, place)].level
                        sent[level] += count * transfer.kind.sent_bytes(transfer.held, size)
            if program.pipeline is not None:
                for (rank, action), num_bytes in program.pipeline.messages.items():
                    if rank == place and num_bytes and action.peer is not None:
                        here, there = program.rank_of(rank), program.rank_of(action.peer)
                        sent[self.cluster.links[self.cluster.between(here, there)].level] += num_bytes
            found.append({level: num for level, num in sent.items() if num})
        return max(found, key=lambda each: sum(each.values()), default={})


def _begun(calls: Iterable[ProgramCall]) -> list[AxisCollective]:
    return [
        each for call in calls if isinstance(call, CollectiveCall) and call.part != "wait" for each in call.transfers
    ]


class _Timeline:
    """The streams of one rank while it runs a graph."""

    def __init__(self, simulator: StepSimulator, program: StepProgram, place: int, pace: float) -> None:
        self._pace = pace
        self._simulator = simulator
        self._program = program
        self._place = place
        self._now = 0.0
        self._computes = 0.0
        self._free: dict[str, float] = defaultdict(float)  # when each stream is free
        self._ends: dict[int, float] = {}  # of what a call has begun, by its position
        self._spans: list[Span] = []
        self._since = 0.0
        self._kind = ""

    def run(self, calls: Sequence[ProgramCall]) -> GraphTime:
        for index, call in enumerate(calls):
            if isinstance(call, OpCall):
                self._compute(call)
            elif isinstance(call, CollectiveCall):
                self._communicate(index, call)
            else:
                self._copy(index, call)
        self._cut("")
        return GraphTime(self._now, self._computes, tuple(self._spans))

    def _compute(self, call: OpCall) -> None:
        self._span_of(call.phase)
        seconds = self._simulator._times.seconds(call)
        self._work(seconds)

    def _span_of(self, phase: str) -> None:
        """Begin the span of a phase, unless it is that of what was computed last."""
        kind = "optimizer" if phase == "update" else phase
        if kind != self._kind:
            self._cut(kind)

    def _work(self, seconds: float) -> None:
        """Compute for so long, slower while a stream transfers."""
        seconds *= self._simulator.cluster.device.in_step / self._pace
        speed = self._simulator.cluster.device.beside_transfers
        busy = max(max(self._free.values(), default=0.0) - self._now, 0.0)
        if speed < 1 and busy > 0:
            done = min(busy * speed, seconds)
            seconds = done / speed + (seconds - done)
        self._now += seconds
        self._computes += seconds

    def _cut(self, kind: str) -> None:
        """End the span of what is computed, and begin one of another kind."""
        if self._kind and self._now > self._since:
            self._spans.append(Span(0, self._kind, self._kind, self._since, self._now))
        self._since, self._kind = self._now, kind

    def _communicate(self, index: int, call: CollectiveCall) -> None:
        before, after = call.copied
        self._lay_out(call.phase, before)
        known = self._simulator._times.measured(call.signature)
        sizes = [self._program.mesh.axis_size(each.axis) for each in call.transfers]
        seconds = sum(self._simulator.collective_seconds(self._program, each, self._place) for each in call.transfers)
        num_bytes = sum(
            int(each.kind.sent_bytes(each.held, size)) for each, size in zip(call.transfers, sizes, strict=True)
        )
        axis = max(zip(sizes, call.transfers, strict=True), key=lambda each: each[0])[1].axis
        beside = self._simulator.overlaps(self._program, axis, self._place)
        kind = "reduce" if call.transfers[0].kind in _SUMS else "gather"
        name = f"{call.transfers[0].kind.title} {axis}"
        if not beside:  # the rank's own work
            if known is not None:
                seconds = known
            elif call.part == "start":
                seconds = 0.0
            self._block(self._now + seconds, kind, name, num_bytes if call.part != "wait" else 0)
            self._lay_out(call.phase, after)
            return
        if call.part != "wait":
            begins = max(self._now, self._free[call.stream])
            ends = self._free[call.stream] = begins + (seconds if known is None else known)
            self._ends[index] = ends
            if call.part == "start":
                if ends > begins:
                    self._spans.append(Span(0, "send", name, begins, ends, num_bytes))
                return
            self._block(ends, kind, name, num_bytes)
        else:
            self._block(self._ends.get(call.begun, self._now), kind, name, 0)
        self._lay_out(call.phase, after)

    def _lay_out(self, phase: str, num_bytes: float) -> None:
        """Copy what is sent or received."""
        if num_bytes:
            self._span_of(phase)
            self._work(
                self._simulator._times.seconds(OpCall(f"aten.clone.default({num_bytes})", "", num_bytes=num_bytes))
            )

    def _copy(self, index: int, call: CopyCall) -> None:
        if call.part == "start":
            begins = max(self._now, self._free["copy"])
            ends = self._free["copy"] = begins + self._simulator.copy_seconds(call)
            self._ends[index] = ends
        else:
            self._block(self._ends.get(call.begun, self._now), "wait", f"copy from {call.home}", call.num_bytes)

    def _block(self, until: float, kind: str, name: str, num_bytes: int) -> None:
        """Do nothing else until then."""
        if until > self._now:
            before = self._kind
            self._cut("")
            self._spans.append(Span(0, kind, name, self._now, until, num_bytes))
            self._now = until
            self._since, self._kind = until, before


def _moved(span: Span, rank: int, by: float, micro: int | None) -> Span:
    return replace(span, rank=rank, start=span.start + by, end=span.end + by, micro=micro)


def _schedule_spans(
    program: StepProgram,
    times: Mapping[RankAction, tuple[float, float]],
    delays: Mapping[RankAction, float],
    begin: float,
) -> Iterable[Span]:
    """Spans of actions, of waits before them, and of messages, which overlap with actions."""
    pipeline = program.pipeline
    assert pipeline is not None
    for rank, actions in enumerate(pipeline.schedule.ranks):
        free = 0.0
        for action in actions:
            start, end = times[rank, action]
            where = (action.micro, action.chunk)
            if action.computes or (action.kind == STEP and end > start):
                if start > free:
                    yield Span(rank, "wait", f"wait for {action}", begin + free, begin + start, 0, *where)
                kind = _KIND.get(action.kind, "optimizer")
                yield Span(rank, kind, str(action), begin + start, begin + end, 0, *where)
            elif action.kind == SEND and delays[rank, action]:
                arrives, num_bytes = start + delays[rank, action], pipeline.messages[rank, action]
                name = f"{action.producer}>{action.peer}"
                yield Span(rank, "send", name, begin + start, begin + arrives, num_bytes, *where)
            free = max(free, end)


def _in_flight(schedule: Schedule, times: Mapping[RankAction, tuple[float, float]], at: float) -> Iterable[Sample]:
    for rank in range(schedule.num_ranks):
        count = 0
        yield Sample(rank, 0.0, 0)
        for action, change in microbatches_in_flight(schedule, rank):
            start, end = times[rank, action]
            count += change
            yield Sample(rank, at + (start if action.kind == FORWARD else end), count)
