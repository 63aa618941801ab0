"""The loop over the actions of a pipeline schedule, on one rank.

The executor knows which values go from which cell to which; what a cell computes, only its `Runner` knows. Sends and
receives are in flight while the rank computes. A received value is waited for by the first cell that reads it, and
freed after the last.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor

from plait.backends.eager.offload.pipeline_activations import PipelineActivations
from plait.backends.eager.rewrites.dead_values import SavedValues
from plait.backends.recorder import TraceRecorder
from plait.comm.group import Done
from plait.comm.protocol import Comm, Work
from plait.compile.stages.stage_graphs import Value, edges_of
from plait.schedule.in_flight import completed_sends
from plait.schedule.readiness import Cell
from plait.spec.schedule import BACKWARD, FORWARD, RECV, REDUCE, SEND, STEP, WEIGHT, Action, Schedule


class Runner(Protocol):
    """Computes a rank's cells."""

    def run_cell(self, cell: Cell, micro: int, saved: SavedValues) -> Mapping[str, Tensor]:
        """Run a cell on a microbatch. The cell takes its inputs out of `saved`; its outputs are returned by name."""

    def reduce(self) -> None:
        """Sum the gradients that other ranks of the pipeline have too. Called once, after all cells."""

    def update(self, micro: int) -> None:
        """Update this rank's parameters by the gradients of the microbatches up to this one."""


_KIND = {FORWARD: "forward", BACKWARD: "backward", WEIGHT: "weight"}


class ScheduleExecutor:
    """Runs one rank's actions of a schedule.

    values       the values that go from cell to cell
    cells        the cells that have a graph; an action of any other computes nothing
    comm         the group along the pipeline
    coordinates  this rank's index on each mesh axis
    activations  offloads what a stage saves between the forward and the backward of a microbatch
    """

    def __init__(
        self,
        schedule: Schedule,
        values: Sequence[Value],
        cells: Sequence[Cell],
        comm: Comm,
        coordinates: Mapping[str, int],
        recorder: TraceRecorder | None = None,
        device: torch.device | None = None,
        activations: PipelineActivations | None = None,
    ) -> None:
        self.schedule = schedule
        self._activations = activations
        computing = [action for action in schedule.ranks[comm.rank] if action.computes]
        self._next = dict(pairwise(computing))
        self._comm = comm
        self._device = device
        self._cells = frozenset(cells)
        self._recorder = recorder
        here = [v for v in values if all(coordinates[axis] == index for axis, index in v.only.items())]
        self._made: dict[Cell, list[Value]] = defaultdict(list)
        self._read: dict[Cell, list[Value]] = defaultdict(list)
        for value in here:
            self._made[value.source].append(value)
            for cell in value.users:
                self._read[cell].append(value)
        self._edges = edges_of(values)
        self._number = {value.name: i for i, value in enumerate(values)}
        self._num_values = len(values)

    def run(self, runner: Runner) -> None:
        """Run the actions of one step."""
        _Step(self, runner).run()

    @cached_property
    def completed(self) -> dict[Action, tuple[Action, ...]]:
        """For each SEND of this rank its earlier SENDs that have been received by then."""
        return completed_sends(self.schedule, self._edges, self._comm.rank)

    def sent(self, rank: int, action: Action) -> int:
        """Bytes that a SEND of that rank moves."""
        return sum(value.num_bytes for _, value, _ in self.carried(rank, action, action.peer))

    def carried(self, source: int, action: Action, target: int | None) -> list[tuple[Cell, Value, tuple[int, ...]]]:
        """The values that a SEND or RECV moves from rank `source` to rank `target`, each with the cell that makes it
        and the stages on `target` that read it. A backward that is not split moves the values of both its cells."""
        assert action.micro is not None and action.of is not None
        stage = self.schedule.stages[source][action.chunk]
        whole = action.of == BACKWARD and not self.schedule.splits(source, action.producer)
        found = []
        for cell in [(action.of, stage), (WEIGHT, stage)] if whole else [(action.of, stage)]:
            for value in self._made[cell]:
                stages = tuple(s for s in value.stages() if self.schedule.where(s, action.micro)[0] == target)
                if stages:
                    found.append((cell, value, stages))
        return found

    def form(self, value: Value) -> Tensor:
        """A tensor of the value's shape and dtype on this rank's device, backed by one element."""
        return torch.empty((), dtype=value.like.dtype, device=self._device).expand(value.like.shape)

    def span(self, kind: str, name: str, action: Action, num_bytes: int = 0) -> AbstractContextManager[object]:
        """Record what runs within the context, if there is a recorder."""
        return nullcontext() if self._recorder is None else self._recorder.span(kind, name, action, num_bytes)

    def tag(self, value: Value, micro: int) -> int:
        """The tag under which the value of a microbatch is sent."""
        return micro * self._num_values + self._number[value.name]


class _Step:
    """One pass over the actions."""

    def __init__(self, executor: ScheduleExecutor, runner: Runner) -> None:
        self._executor = executor
        self._runner = runner
        self._schedule = executor.schedule
        self._comm = executor._comm
        self._rank = self._comm.rank
        self._saved: dict[tuple[int, int], SavedValues] = defaultdict(dict)  # by microbatch and stage
        self._unsent: dict[tuple[Cell, int], dict[str, _Unsent]] = {}  # by cell and microbatch
        self._received: dict[tuple[int, int], dict[str, Work]] = defaultdict(dict)  # by microbatch and stage
        self._sent: dict[Action, list[tuple[Work, Tensor]]] = {}

    def run(self) -> None:
        actions = self._schedule.ranks[self._rank]
        last_reduce = max((i for i, action in enumerate(actions) if action.kind == REDUCE), default=-1)
        for index, action in enumerate(actions):
            if action.computes:
                self._compute(action)
            elif action.kind == SEND:
                self._send(action)
            elif action.kind == RECV:
                self._receive(action)
            elif action.kind == STEP and action.micro is not None:
                with self._executor.span("optimizer", str(action), action):
                    self._runner.update(action.micro)
            elif index == last_reduce:
                with self._executor.span("reduce", str(action), action):
                    self._runner.reduce()
        self._release(tuple(self._sent))

    def _compute(self, action: Action) -> None:
        assert action.micro is not None
        stages = self._schedule.stages[self._rank]
        stage, micro = stages[action.chunk], action.micro
        cells: list[Cell] = [(action.kind, stage)]
        if action.kind == BACKWARD and not self._schedule.splits(self._rank, action):
            cells.append((WEIGHT, stage))
        activations, after = self._executor._activations, self._executor._next.get(action)
        if activations is not None:
            if action.kind == BACKWARD:
                activations.back(micro, stage, self._saved[micro, stage])
            if after is not None and after.kind == BACKWARD and after.micro is not None:
                activations.begin(after.micro, stages[after.chunk])
        for cell in cells:
            if cell in self._executor._cells:
                self._run_cell(cell, micro, action)
        if activations is not None and action.kind == FORWARD and after != Action(BACKWARD, micro, action.chunk):
            activations.leave(micro, stage, self._saved[micro, stage])

    def _run_cell(self, cell: Cell, micro: int, action: Action) -> None:
        saved = self._saved[micro, cell[1]]
        received = self._received[micro, cell[1]]
        wanted = [value for value in self._executor._read[cell] if value.name in received]
        if wanted:
            num_bytes = sum(value.num_bytes for value in wanted)
            with self._executor.span("wait", str(action), action, num_bytes):
                for value in wanted:
                    saved[value.name] = received.pop(value.name).wait()
        with self._executor.span(_KIND[action.kind], str(action), action):
            made = self._runner.run_cell(cell, micro, saved)
        unsent: dict[str, _Unsent] = {}
        for value in self._executor._made[cell]:
            tensor = made[value.name]
            if any(stage == cell[1] for _, stage in value.users):
                saved[value.name] = tensor
            peers = set()
            for stage in value.stages():
                peer = self._schedule.where(stage, micro)[0]
                if peer == self._rank:
                    self._saved[micro, stage][value.name] = tensor
                else:
                    peers.add(peer)
            if peers:
                unsent[value.name] = _Unsent(tensor.contiguous(), peers)
        if unsent:
            self._unsent[cell, micro] = unsent

    def _release(self, actions: Iterable[Action]) -> None:
        """Wait for SENDs that have been received, and free what they sent."""
        for action in actions:
            for work, _ in self._sent.pop(action, ()):
                work.wait()

    def _send(self, action: Action) -> None:
        assert action.micro is not None and action.peer is not None
        if self._sent:
            self._release(self._executor.completed[action])
        going = self._executor.carried(self._rank, action, action.peer)
        num_bytes = sum(value.num_bytes for _, value, _ in going)
        with self._executor.span("send", str(action), action, num_bytes):
            for cell, value, _ in going:
                unsent = self._unsent[cell, action.micro]
                message = unsent[value.name]
                work = self._comm.send(message.tensor, action.peer, self._executor.tag(value, action.micro))
                if not isinstance(work, Done):  # a send that is done has copied the tensor
                    self._sent.setdefault(action, []).append((work, message.tensor))
                message.peers.remove(action.peer)
                if not message.peers:
                    del unsent[value.name]

    def _receive(self, action: Action) -> None:
        assert action.micro is not None and action.peer is not None
        for _, value, stages in self._executor.carried(action.peer, action, self._rank):
            work = self._comm.recv(self._executor.form(value), action.peer, self._executor.tag(value, action.micro))
            shared = work if len(stages) == 1 else _SharedWork(work)
            for each in stages:
                self._received[action.micro, each][value.name] = shared


@dataclass
class _Unsent:
    """A value, and the ranks that it must still be sent to."""

    tensor: Tensor
    peers: set[int]


class _SharedWork:
    """A receive that several stages of a rank wait for."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._result: Tensor | None = None

    def wait(self) -> Tensor:
        if self._result is None:
            self._result = self._work.wait()
        return self._result
