"""Records the spans of one rank's last steps, as tuples in a list, at almost no cost.

A span is two readings of the monotonic clock and one append. On a GPU a span is a pair of events in the rank's stream,
which are read only when the trace is written: it measures when the device ran a kernel, not when Python launched it.

A traced run also counts the rows that a rank's tokens send to each expert, and those that find no room there. The
rank's graph is given a call for each mixture, which keeps small tensors on the device, and these too are read only when
the trace is written: no step waits for them.
"""

from __future__ import annotations

import os
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter_ns
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from plait.comm.device import Event, bytes_allocated, is_host, synchronize
from plait.comm.protocol import World
from plait.comm.traced_comm import clock_offset, trace_comms, untrace_comms
from plait.compile.ir.calls import copy_graph, is_item, op_spec_of
from plait.compile.ir.node_info import info_of, is_backward, is_forward
from plait.compile.ops.experts import expert_order, expert_slots
from plait.spec.schedule import BACKWARD, FORWARD, cell
from plait.spec.trace import COMPUTE_KINDS, NEXT_BATCH

Counts = list[tuple[str, Tensor, Tensor | None]]  # the mixture's module, ends of the experts' rows, dropped rows


class ExpertCounter:
    """Counts of one rank since the last `take`."""

    def __init__(self) -> None:
        self._counts: Counts = []

    def with_counts(self, graph: Graph) -> Graph:
        """A copy of a graph that counts the rows of each mixture in its forward pass; the graph itself if there are
        none."""
        if not any(_is_route(node) for node in graph.nodes):
            return graph
        copy = copy_graph(graph)
        for node in filter(_is_route, list(copy.nodes)):
            module = info_of(node).module
            items = {user.args[1]: user for user in node.users if is_item(user)}
            with copy.inserting_after(max(items.values())):
                if node.target is expert_order:
                    copy.call_function(self._note_order, (module, node))
                else:
                    copy.call_function(self._note_slots, (module, *node.args, node))
        return copy

    def take(self) -> Counts:
        """What was counted, which is then forgotten."""
        found, self._counts = self._counts, []
        return found

    def _note_order(self, module: str, sorted_rows: tuple[Tensor, Tensor, Tensor]) -> None:
        self._counts.append((module, sorted_rows[2], None))

    def _note_slots(
        self, module: str, ids: Tensor, num_experts: int, parts: int, room: int, sent: tuple[Tensor, Tensor, Tensor]
    ) -> None:
        total = num_experts * parts
        known = ids.long().clamp(max=total)
        counts = known.new_zeros(total + 1).scatter_add_(0, known, torch.ones_like(known))[:total]
        dropped = ((sent[0] == parts * room) & (known < total)).sum()
        self._counts.append((module, counts.cumsum(0), dropped))


def read_counts(counts: Counts) -> dict[str, tuple[list[int], int]]:
    """For each mixture the rows of each expert, and how many were dropped, summed over what was counted."""
    found: dict[str, tuple[list[int], int]] = {}
    for module, ends, dropped in counts:
        rows = _between(ends.tolist())
        before, lost = found.get(module, ([0] * len(rows), 0))
        found[module] = (
            [a + b for a, b in zip(before, rows, strict=True)],
            lost + (0 if dropped is None else int(dropped)),
        )
    return found


def _between(ends: Iterable[int]) -> list[int]:
    found, start = [], 0
    for end in ends:
        found.append(end - start)
        start = end
    return found


def _is_route(node: Node) -> bool:
    """Whether a call of the forward pass says where the rows of this rank's tokens go."""
    if node.target not in (expert_order, expert_slots) or not is_forward(node):
        return False
    (ids, *_) = node.args
    assert isinstance(ids, Node)
    return not _has_arrived(ids)


def _has_arrived(ids: Node) -> bool:
    """Whether the experts are those of rows from other ranks, where they have been counted."""
    if op_spec_of(ids).communicates is None:
        return False
    return any(is_item(source) and source.args[0].target is expert_slots for source in ids.all_input_nodes)  # type: ignore[union-attr]


NUM_STEPS = 20  # steps that are kept
KIND = {FORWARD: "forward", BACKWARD: "backward"}
_HOST_KINDS = (NEXT_BATCH,)  # measured by the host's clock on a GPU too
_SAMPLE_NS = 5_000_000  # shortest time between two samples of memory
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")

SpanRow = tuple[str, str, Any, Any, int, Any]  # kind, name, start, end, bytes, action


@dataclass
class StepRows:
    """One step: its spans as rows, samples of memory as (nanoseconds, reading), the bytes sent to each rank, and the
    rows of experts."""

    step: int
    rows: list[SpanRow]
    memory: list[tuple[int, Any]]
    sent: dict[int, int] = field(default_factory=dict)
    counts: Counts = field(default_factory=list)


class TraceRecorder:
    """Records the spans of one rank. Until `close`, collectives of `world` are recorded too (comm/traced_comm.py).

    The constructor measures the offset between clocks, so all ranks must call it together.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.rank = world.rank
        self.offset_ns = clock_offset(world)
        self.steps: deque[StepRows] = deque(maxlen=NUM_STEPS)
        self.memory_of = "resident" if is_host(world.device) else "allocated"
        self.rows: list[SpanRow] = []
        self._memory: list[tuple[int, Any]] = []
        self._next_sample = 0
        self._span = _Span if is_host(world.device) else _DeviceSpan
        self._statm = os.open("/proc/self/statm", os.O_RDONLY) if os.path.exists("/proc/self/statm") else None
        self._sent: Counter[int] = Counter()
        self._experts = ExpertCounter()
        trace_comms(world, self)

    def span(self, kind: str, name: str, action: object = None, num_bytes: int = 0) -> Any:
        """A context manager that records a span (spec/trace.py). `action` gives its microbatch and chunk."""
        return (_Span if kind in _HOST_KINDS else self._span)(self, kind, name, action, num_bytes)

    @contextmanager
    def microbatch(self, index: int) -> Iterator[None]:
        """Record a microbatch of a step without a pipeline: its forward, and from `begin_backward` on its backward."""
        self._whole = self.span(KIND[FORWARD], f"{FORWARD}{index}", cell(FORWARD, index, 0))
        self._whole.__enter__()
        try:
            yield
        finally:
            self._whole.__exit__(None, None, None)

    def begin_backward(self) -> None:
        """End the span of the forward and begin that of the backward. Graphs `with_backward_mark` call it."""
        index = self._whole._action.micro
        self._whole.__exit__(None, None, None)
        self._whole = self.span(KIND[BACKWARD], f"{BACKWARD}{index}", cell(BACKWARD, index, 0))
        self._whole.__enter__()

    def with_backward_mark(self, graph: Graph) -> Graph:
        """A copy of a step's graph that calls `begin_backward` where backward begins."""
        copy = copy_graph(graph)
        first = next((n for n in copy.nodes if is_backward(n) and _is_op(n)), None)
        if first is not None:
            with copy.inserting_before(first):
                copy.call_function(self.begin_backward)
        return copy

    def with_expert_counts(self, graph: Graph) -> Graph:
        """A graph that counts the rows of experts too (backends/recorder.py)."""
        return self._experts.with_counts(graph)

    def begin(self) -> None:
        """Begin a step. Of the rows since the last step, only the wait for the batch belongs to this one."""
        self._experts.take()
        del self._memory[:]
        self.rows = [row for row in self.rows if row[0] == NEXT_BATCH][-1:]
        self._sent = self._count()

    def end(self, step: int) -> None:
        """End the step of this number and keep its rows."""
        sent = self._count()
        sent.subtract(self._sent)
        found = {to: n for to, n in sorted(sent.items()) if n}
        self.steps.append(StepRows(step, self.rows, self._memory, found, self._experts.take()))
        self.rows, self._memory = [], []

    def sample(self, now: int) -> None:
        """Sample the memory in use, unless the last sample is recent."""
        if now < self._next_sample:
            return
        self._next_sample = now + _SAMPLE_NS
        if self.memory_of == "allocated":
            self._memory.append((now, bytes_allocated(self.world.device)))
        elif self._statm is not None:
            self._memory.append((now, os.pread(self._statm, 64, 0)))

    def read(self) -> list[StepRows]:
        """The steps that are kept, with times in nanoseconds of rank 0's clock and memory in bytes."""
        to_host = self._device_clock()

        def time(moment: object) -> int:
            return (moment if isinstance(moment, int) else to_host(moment)) - self.offset_ns

        found = []
        for each in self.steps:
            rows: list[SpanRow] = [
                (kind, name, time(start), max(time(start), time(end)), num_bytes, action)
                for kind, name, start, end, num_bytes, action in each.rows
            ]
            memory = [(time(at), _bytes(value)) for at, value in each.memory]
            found.append(StepRows(each.step, rows, memory, each.sent, each.counts))
        return found

    def close(self) -> None:
        """Stop recording."""
        untrace_comms(self.world)
        if self._statm is not None:
            os.close(self._statm)
            self._statm = None

    def _count(self) -> Counter[int]:
        """Bytes sent to each rank so far."""
        found: Counter[int] = Counter()
        for axis in self.world.mesh.communicators:
            found.update(self.world.comm(axis).links.sent)
        return found

    def _device_clock(self) -> Any:
        """A function from an event to the host's nanoseconds, by way of one event timed on both clocks."""
        device = self.world.device
        if is_host(device):
            return None
        synchronize(device)
        anchor = Event(device, timing=True)
        anchor.synchronize()
        now = perf_counter_ns()
        return lambda event: now - int(event.seconds_until(anchor) * 1e9)


class _Span:
    __slots__ = ("_action", "_kind", "_name", "_num_bytes", "_recorder", "_start")

    def __init__(self, recorder: TraceRecorder, kind: str, name: str, action: object, num_bytes: int) -> None:
        self._recorder = recorder
        self._kind = kind
        self._name = name
        self._action = action
        self._num_bytes = num_bytes

    def __enter__(self) -> None:
        self._start: int | Event = perf_counter_ns()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        now = perf_counter_ns()
        recorder = self._recorder
        recorder.rows.append((self._kind, self._name, self._start, now, self._num_bytes, self._action))
        if now >= recorder._next_sample and self._kind in COMPUTE_KINDS:
            recorder.sample(now)


class _DeviceSpan(_Span):
    __slots__ = ()

    def __enter__(self) -> None:
        self._start = Event(self._recorder.world.device, timing=True)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        recorder = self._recorder
        end = Event(recorder.world.device, timing=True)
        recorder.rows.append((self._kind, self._name, self._start, end, self._num_bytes, self._action))
        if self._kind in COMPUTE_KINDS:
            recorder.sample(perf_counter_ns())


def _is_op(node: Node) -> bool:
    """Whether a node computes: an op, or what a backend makes of several. Fetches and gathers for backward may begin
    well before it."""
    return isinstance(node.target, torch._ops.OpOverload) or not op_spec_of(node).known


def _bytes(value: Any) -> int:
    """Resident bytes of a line of /proc/self/statm; a number is returned as it is."""
    return int(value.split()[1]) * _PAGE_BYTES if isinstance(value, bytes) else int(value)
