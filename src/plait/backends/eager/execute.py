"""The executor: the one loop over the actions of a schedule, on one rank.

It knows which values go from cell to cell and where, and nothing of what cells compute: a `Runner` does that. Sends
and receives are under way while the rank computes; a value is waited for when a cell takes it, and let go when no cell
of the rank needs it any more.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor

from plait.comm.group import Done
from plait.comm.protocol import Comm, Work
from plait.compile.stages.stage_graphs import Value, edges_of
from plait.schedule.in_flight import completed_sends
from plait.schedule.readiness import Cell
from plait.spec.action import BACKWARD, FORWARD, RECV, REDUCE, SEND, STEP, WEIGHT, Action
from plait.spec.schedule import Schedule

Box = dict[str, Tensor]


class Runner(Protocol):
    """What a rank does for its cells."""

    def run_cell(self, cell: Cell, micro: int, box: Box) -> Mapping[str, Tensor]:
        """Run a cell on a microbatch; it takes what it reads from the box. Returns the values that it hands on."""

    def reduce(self) -> None:
        """Sum the gradients that other ranks of the pipeline have too; once, after all cells."""

    def update(self, micro: int) -> None:
        """Update this rank's parameters by the gradients of microbatches up to this one (STEP3)."""


class Keeper(Protocol):
    """Where what a stage keeps of a microbatch is between its forward and its backward (run.homes.between)."""

    def leave(self, micro: int, stage: int, box: Box) -> None: ...
    def begin(self, micro: int, stage: int) -> None: ...
    def back(self, micro: int, stage: int, box: Box) -> None: ...


class Clock(Protocol):
    """Where spans are recorded."""

    def span(self, kind: str, name: str, action: Action, num_bytes: int = 0) -> AbstractContextManager[Any]: ...


class _NoClock:
    def span(self, kind: str, name: str, action: Action, num_bytes: int = 0) -> AbstractContextManager[Any]:
        return nullcontext()


_KIND = {FORWARD: "forward", BACKWARD: "backward", WEIGHT: "weight"}


class Executor:
    """Runs this rank's part of a schedule. `comm` is the group along the pipeline; `cells` are those that there are."""

    def __init__(
        self,
        schedule: Schedule,
        values: Sequence[Value],
        cells: Sequence[Cell],
        comm: Comm,
        coordinates: Mapping[str, int],
        clock: Clock | None = None,
        device: torch.device | None = None,
        keeper: Keeper | None = None,
    ) -> None:
        self.schedule = schedule
        self._keeper = keeper
        computing = [action for action in schedule.ranks[comm.rank] if action.computes]
        self._next = dict(pairwise(computing))
        self._comm = comm
        self._device = device
        self._cells = frozenset(cells)
        self._clock: Clock = clock or _NoClock()
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
        """Go through the actions once."""
        _Step(self, runner).run()

    @cached_property
    def taken(self) -> dict[Action, tuple[Action, ...]]:
        """Of each SEND of this rank the earlier ones that others have taken by then."""
        return completed_sends(self.schedule, self._edges, self._comm.rank)

    def sent(self, rank: int, action: Action) -> int:
        """Bytes of what a SEND of that rank moves."""
        return sum(value.num_bytes for _, value, _ in self.carried(rank, action, action.peer))

    def carried(self, source: int, action: Action, target: int | None) -> list[tuple[Cell, Value, tuple[int, ...]]]:
        """What a SEND or RECV moves from one rank to another: the cells that make it, the values, and the stages there
        that read each. Of a backward that is not split it is what both its parts make."""
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
        """A tensor of its shape and type on this rank's device, of next to no memory."""
        return torch.empty((), dtype=value.like.dtype, device=self._device).expand(value.like.shape)

    def tag(self, value: Value, micro: int) -> int:
        return micro * self._num_values + self._number[value.name]


class _Step:
    """One pass over the actions."""

    def __init__(self, executor: Executor, runner: Runner) -> None:
        self._executor = executor
        self._runner = runner
        self._schedule = executor.schedule
        self._comm = executor._comm
        self._rank = self._comm.rank
        self._boxes: dict[tuple[int, int], Box] = defaultdict(dict)  # by microbatch and stage
        self._leaving: dict[tuple[Cell, int], dict[str, _Leaving]] = {}  # what is still to be sent, as _boxes by cell
        self._coming: dict[tuple[int, int], dict[str, Work]] = defaultdict(dict)  # as _boxes
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
                with self._executor._clock.span("optimizer", str(action), action):
                    self._runner.update(action.micro)
            elif index == last_reduce:
                with self._executor._clock.span("reduce", str(action), action):
                    self._runner.reduce()
        self._let_go(tuple(self._sent))

    def _compute(self, action: Action) -> None:
        assert action.micro is not None
        stages = self._schedule.stages[self._rank]
        stage, micro = stages[action.chunk], action.micro
        cells: list[Cell] = [(action.kind, stage)]
        if action.kind == BACKWARD and not self._schedule.splits(self._rank, action):
            cells.append((WEIGHT, stage))
        keeper, after = self._executor._keeper, self._executor._next.get(action)
        if keeper is not None:
            if action.kind == BACKWARD:
                keeper.back(micro, stage, self._boxes[micro, stage])
            if after is not None and after.kind == BACKWARD and after.micro is not None:
                keeper.begin(after.micro, stages[after.chunk])
        for cell in cells:
            if cell in self._executor._cells:
                self._run_cell(cell, micro, action)
        if keeper is not None and action.kind == FORWARD and after != Action(BACKWARD, micro, action.chunk):
            keeper.leave(micro, stage, self._boxes[micro, stage])

    def _run_cell(self, cell: Cell, micro: int, action: Action) -> None:
        box = self._boxes[micro, cell[1]]
        coming = self._coming[micro, cell[1]]
        wanted = [value for value in self._executor._read[cell] if value.name in coming]
        if wanted:
            num_bytes = sum(value.num_bytes for value in wanted)
            with self._executor._clock.span("wait", str(action), action, num_bytes):
                for value in wanted:
                    box[value.name] = coming.pop(value.name).wait()
        with self._executor._clock.span(_KIND[action.kind], str(action), action):
            made = self._runner.run_cell(cell, micro, box)
        away: dict[str, _Leaving] = {}
        for value in self._executor._made[cell]:
            tensor = made[value.name]
            if any(stage == cell[1] for _, stage in value.users):
                box[value.name] = tensor
            peers = set()
            for stage in value.stages():
                peer = self._schedule.where(stage, micro)[0]
                if peer == self._rank:
                    self._boxes[micro, stage][value.name] = tensor
                else:
                    peers.add(peer)
            if peers:
                away[value.name] = _Leaving(tensor.contiguous(), peers)
        if away:
            self._leaving[cell, micro] = away

    def _let_go(self, actions: Iterable[Action]) -> None:
        """Wait for SENDs that others have taken, and let go of what they sent."""
        for action in actions:
            for work, _ in self._sent.pop(action, ()):
                work.wait()

    def _send(self, action: Action) -> None:
        assert action.micro is not None and action.peer is not None
        if self._sent:
            self._let_go(self._executor.taken[action])
        going = self._executor.carried(self._rank, action, action.peer)
        num_bytes = sum(value.num_bytes for _, value, _ in going)
        with self._executor._clock.span("send", str(action), action, num_bytes):
            for cell, value, _ in going:
                away = self._leaving[cell, action.micro]
                leaving = away[value.name]
                work = self._comm.send(leaving.tensor, action.peer, self._executor.tag(value, action.micro))
                if not isinstance(work, Done):  # what has been copied out may go
                    self._sent.setdefault(action, []).append((work, leaving.tensor))
                leaving.peers.remove(action.peer)
                if not leaving.peers:
                    del away[value.name]

    def _receive(self, action: Action) -> None:
        assert action.micro is not None and action.peer is not None
        for _, value, stages in self._executor.carried(action.peer, action, self._rank):
            work = self._comm.recv(self._executor.form(value), action.peer, self._executor.tag(value, action.micro))
            shared = work if len(stages) == 1 else _Shared(work)
            for each in stages:
                self._coming[action.micro, each][value.name] = shared


@dataclass
class _Leaving:
    """A value that these ranks are still to be sent."""

    tensor: Tensor
    peers: set[int]


class _Shared:
    """A message that several stages of a rank wait for."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._result: Tensor | None = None

    def wait(self) -> Tensor:
        if self._result is None:
            self._result = self._work.wait()
        return self._result
