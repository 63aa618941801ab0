"""The recorder: what one rank did in its last steps, as tuples in a list, so that looking takes next to no time.

A span is two readings of the monotonic clock and one append. On a GPU it is a pair of events in the stream of the rank,
which are read only when the trace is written: a span is then what the device did, not when Python asked for it.
"""

from __future__ import annotations

import os
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter_ns
from types import TracebackType
from typing import Any

import torch
from torch.fx import Graph, Node

from plait.comm.device import Event, bytes_allocated, is_host, synchronize
from plait.comm.protocol import World
from plait.comm.traced import clock_offset, trace_comms, untrace_comms
from plait.compile.ir.calls import copy_graph
from plait.compile.ir.node_info import is_backward
from plait.spec.action import BACKWARD, FORWARD, cell
from plait.spec.trace import COMPUTE_KINDS, NEXT_BATCH

NUM_STEPS = 20  # that are kept
KIND = {FORWARD: "forward", BACKWARD: "backward"}
_HOST_KINDS = (NEXT_BATCH,)  # also where the rest is on a GPU
_SAMPLE_NS = 5_000_000  # between two samples of memory, at least
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")

Row = tuple[str, str, Any, Any, int, Any]  # kind, name, start, end, bytes, action


@dataclass
class StepRows:
    """One step: its rows, samples of memory as (nanoseconds, what was read), and bytes sent to each rank."""

    step: int
    rows: list[Row]
    memory: list[tuple[int, Any]]
    sent: dict[int, int] = field(default_factory=dict)


class TraceRecorder:
    """Records spans of one rank; `world` is changed so that its collectives are seen (comm.traced), until `close`.

    Every rank makes one at the same time.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.rank = world.rank
        self.offset_ns = clock_offset(world)
        self.steps: deque[StepRows] = deque(maxlen=NUM_STEPS)
        self.memory_of = "resident" if is_host(world.device) else "allocated"
        self.rows: list[Row] = []
        self._memory: list[tuple[int, Any]] = []
        self._next_sample = 0
        self._span = _Span if is_host(world.device) else _DeviceSpan
        self._statm = os.open("/proc/self/statm", os.O_RDONLY) if os.path.exists("/proc/self/statm") else None
        self._sent: Counter[int] = Counter()
        trace_comms(world, self)

    def span(self, kind: str, name: str, action: Any = None, num_bytes: int = 0) -> Any:
        """A context manager that records what goes on within (spec.trace.Span); `action` has microbatch and chunk."""
        return (_Span if kind in _HOST_KINDS else self._span)(self, kind, name, action, num_bytes)

    @contextmanager
    def microbatch(self, index: int) -> Iterator[None]:
        """Record a microbatch that goes through the whole step: forward, and backward from `turn` on."""
        self._whole = self.span(KIND[FORWARD], f"{FORWARD}{index}", cell(FORWARD, index, 0))
        self._whole.__enter__()
        try:
            yield
        finally:
            self._whole.__exit__(None, None, None)

    def turn(self) -> None:
        """Backward begins: called by graphs that `marked` has seen."""
        index = self._whole._action.micro
        self._whole.__exit__(None, None, None)
        self._whole = self.span(KIND[BACKWARD], f"{BACKWARD}{index}", cell(BACKWARD, index, 0))
        self._whole.__enter__()

    def marked(self, graph: Graph) -> Graph:
        """A copy of the graph of a step that calls `turn` where backward begins."""
        copy = copy_graph(graph)
        first = next((n for n in copy.nodes if is_backward(n) and _is_op(n)), None)
        if first is not None:
            with copy.inserting_before(first):
                copy.call_function(self.turn)
        return copy

    def begin(self) -> None:
        """A step begins. Of what was recorded since the last one, only the wait for the batch belongs to it."""
        del self._memory[:]
        self.rows = [row for row in self.rows if row[0] == NEXT_BATCH][-1:]
        self._sent = self._count()

    def end(self, step: int) -> None:
        """The step of that number is over."""
        sent = self._count()
        sent.subtract(self._sent)
        self.steps.append(StepRows(step, self.rows, self._memory, {to: n for to, n in sorted(sent.items()) if n}))
        self.rows, self._memory = [], []

    def sample(self, now: int) -> None:
        """Note how much memory there is in use, if that was not just done."""
        if now < self._next_sample:
            return
        self._next_sample = now + _SAMPLE_NS
        if self.memory_of == "allocated":
            self._memory.append((now, bytes_allocated(self.world.device)))
        elif self._statm is not None:
            self._memory.append((now, os.pread(self._statm, 64, 0)))

    def read(self) -> list[StepRows]:
        """All steps that are kept, in nanoseconds of rank 0's clock and in bytes."""
        to_host = self._device_clock()

        def time(moment: Any) -> int:
            return (moment if isinstance(moment, int) else to_host(moment)) - self.offset_ns

        found = []
        for each in self.steps:
            rows: list[Row] = [
                (kind, name, time(start), max(time(start), time(end)), num_bytes, action)
                for kind, name, start, end, num_bytes, action in each.rows
            ]
            memory = [(time(at), _bytes(value)) for at, value in each.memory]
            found.append(StepRows(each.step, rows, memory, each.sent))
        return found

    def close(self) -> None:
        """Record no more."""
        untrace_comms(self.world)
        if self._statm is not None:
            os.close(self._statm)
            self._statm = None

    def _count(self) -> Counter[int]:
        """Bytes sent to each rank so far."""
        found: Counter[int] = Counter()
        for axis in self.world.mesh.names:
            found.update(self.world.comm(axis).links.sent)
        return found

    def _device_clock(self) -> Any:
        """From an event to the host's nanoseconds, by an event whose time is known on both."""
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

    def __init__(self, recorder: TraceRecorder, kind: str, name: str, action: Any, num_bytes: int) -> None:
        self._recorder = recorder
        self._kind = kind
        self._name = name
        self._action = action
        self._num_bytes = num_bytes

    def __enter__(self) -> None:
        self._start: Any = perf_counter_ns()

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
    """Whether it computes: what is fetched or gathered for backward may begin well before it."""
    return isinstance(node.target, torch._ops.OpOverload)


def _bytes(value: Any) -> int:
    """Resident bytes from a line of statm, or the number that it is."""
    return int(value.split()[1]) * _PAGE_BYTES if isinstance(value, bytes) else int(value)
