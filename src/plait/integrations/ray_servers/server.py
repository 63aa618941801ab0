"""A parameter server: it holds its pieces of the variables, and updates them on the coordinator's orders.

A server refuses a gradient of the wrong shape or dtype, of a version that does not exist, or of another job. Refusals
are counted and logged, and the run goes on. A server writes snapshots of itself; a restarted server loads the last one,
and the numbers of the following updates then show how many were lost.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from plait.engine.checkpoint import load, saved_state
from plait.engine.checkpoint.checkpoint_folders import has_checkpoints
from plait.engine.checkpoint.write import Saver
from plait.engine.cpu_settings import keep_freed_memory
from plait.engine.rank_optimizers import OptimizerFactory, SchedulerFactory
from plait.integrations.ray_servers.arrays import dtype_of, packed, to_array, to_tensor, unpacked
from plait.integrations.ray_servers.optimizer_shard import ServerShard
from plait.integrations.ray_servers.push_compression import Coding
from plait.integrations.ray_servers.tables.table_shard import Ids, Tables, TableSpec
from plait.schedule.variable_placement import Piece

_BETWEEN_SNAPSHOTS = 20.0  # seconds; and never more than this part of the time is spent on the copies for them
_PART_FOR_SNAPSHOTS = 0.02


@dataclass(frozen=True)
class Member:
    """A gradient that is part of an update.

    worker   the worker that pushed it
    number   its number among the worker's pushes
    share    its share in the update
    base     the version of the values that it was computed on
    job      the name of the run that it belongs to
    """

    worker: int
    number: int
    share: float
    base: int
    job: str


@dataclass(frozen=True)
class UpdateOrder:
    """The coordinator's order to every server to make update `number`, after which `step` steps are done.

    `next_piece` is the next piece of the data, kept for a coordinator that restarts. With `two_phase` the servers first
    report the norm of their part of the gradient, and are then told the factor to scale it by.
    """

    number: int
    step: int
    members: tuple[Member, ...]
    next_piece: int
    two_phase: bool = False


@dataclass(frozen=True)
class UpdateDone:
    """A server's report of an update.

    refused    (worker, reason) for each gradient that it did not use
    unused     how many of the run's updates and gradients its values lack, including these
    came_back  whether it was restarted before this update
    square     the squared norm of its part of the gradient, with two phases
    """

    refused: tuple[tuple[int, str], ...] = ()
    unused: int = 0
    came_back: bool = False
    square: float = 0.0


@dataclass
class Standing:
    """The position of a server in the run; `number` is -1 for a server that has no values yet.

    `used` has the number of each worker's last used gradient, because a restarted coordinator may receive a push twice.
    `unused` counts lost updates and refused gradients.
    """

    number: int = -1
    step: int = 0
    next_piece: int = 0
    used: dict[int, int] = field(default_factory=dict)
    unused: int = 0


@dataclass
class Server:
    """A server's values, optimizer state and position. `fetch` returns the arrays of a worker's push, and raises if
    they were lost with the worker. `folder` is where its snapshots go."""

    job: str
    pieces: Sequence[Piece]
    make_optimizer: OptimizerFactory
    make_scheduler: SchedulerFactory | None
    folder: str
    fetch: Callable[[Any], Sequence[Any]] = lambda arrays: arrays
    table_specs: Sequence[TableSpec] = ()
    coding: Coding = Coding()  # noqa: RUF009  (a frozen value)
    standing: Standing = field(default_factory=Standing)

    def __post_init__(self) -> None:
        self.shard = ServerShard(self.pieces, self.make_optimizer, self.make_scheduler)
        self.tables = Tables(self.table_specs)
        self._came_back = False
        self._open = False  # whether an update waits for its second phase
        self._saver = Saver()
        self._saved_at = time.monotonic()
        self._took = 0.0
        if has_checkpoints(self.folder):
            extra = load.load(self.shard, self.folder)
            if extra["job"] == self.job:
                self._came_back = True
                self.tables.load(extra["tables"])
                self._saved_at = 0.0  # a snapshot is due at once
                self.standing = Standing(
                    extra["number"], self.shard.step_number, extra["next_piece"], extra["used"], extra["unused"]
                )

    def start(self, values: Sequence[np.ndarray], state: Mapping[str, Any], standing: Standing) -> None:
        """Take over the values, one array per piece, and the state of optimizer and scheduler, and write a snapshot."""
        for parameter, array, piece in zip(self.shard.parameters.values(), values, self.pieces, strict=True):
            parameter.detach().copy_(to_tensor(array, dtype_of(piece)))
        if state:
            kept = {n: {k: unpacked(v) for k, v in of.items()} for n, of in state["optimizer"].items()}
            self.shard.set_optimizer_state(kept)
            if state["groups"] is not None:
                self.shard.set_options(state["groups"], state["scheduler"])
            self.tables.load({n: {k: unpacked(v) for k, v in of.items()} for n, of in state["tables"].items()})
        self.shard.step_number = standing.step
        self.standing = standing
        self.snapshot(wait=True)

    def update(self, order: UpdateOrder, pushes: Sequence[object]) -> UpdateDone:
        """Make the update from the members' pushes. An update that was made before is not made again."""
        here = self.standing
        if order.number <= here.number:
            return UpdateDone(unused=here.unused)
        lost, came_back = order.number - here.number - 1 + self._open, self._came_back
        self._came_back, self._open = False, order.two_phase  # an open update is of a coordinator that is gone
        gradients: list[Any] = []
        shares: list[float] = []
        refused: list[tuple[int, str]] = []
        for member, push in zip(order.members, pushes, strict=True):
            found = self._gradient(order.number, member, push)
            if isinstance(found, str):
                refused.append((member.worker, found))
            else:
                gradients.append(found)
                shares.append(member.share)
                here.used[member.worker] = member.number
        here.unused += lost + len(refused)
        square = 0.0
        if gradients:
            shares = shares if not refused else [share / sum(shares) for share in shares]
            num = len(self.pieces)
            self.shard.set_gradients([self.coding.tensors(push[:num], self.pieces) for push in gradients], shares)
            rows_square = self.tables.set_gradients([push[num:] for push in gradients], shares)
            if order.two_phase:
                square = self.shard.square() + rows_square
            else:
                self.shard.step()
                self.tables.step()
        here.number, here.next_piece, here.step = order.number, order.next_piece, order.step
        if not order.two_phase:
            self._done()
        return UpdateDone(tuple(refused), here.unused, came_back, square)

    def finish(self, number: int, scale: float) -> None:
        """The second phase of an update: step with the gradients scaled by `scale`."""
        if number == self.standing.number:  # otherwise the server was restarted in between, without the gradients
            self._open = False
            self.shard.step(scale)
            self.tables.step(scale)
            self._done()

    def update_and_read(self, order: UpdateOrder, pushes: Sequence[Any]) -> tuple[UpdateDone, np.ndarray]:
        """Make the update; return the report and the values after it."""
        return self.update(order, pushes), self.read()

    def read(self) -> np.ndarray:
        """The shard's values as bytes, uint8. The array shares the shard's memory; the sender copies it."""
        found: np.ndarray = self.shard.flat.numpy()
        return found

    def pull(self, ids: Sequence[Ids]) -> list[np.ndarray]:
        """For each table, the rows of the given ids, [number of ids, dim]."""
        return [rows.pull(some) for rows, some in zip(self.tables.rows.values(), ids, strict=True)]

    def state(self) -> tuple[list[np.ndarray], dict[str, dict[str, Any]], dict[str, dict[str, object]]]:
        """The state for a checkpoint: the values, an array per piece; the optimizer state by piece; the tables."""
        kept = {
            name: {key: packed(value) for key, value in values.items()}
            for name, values in self.shard.optimizer_state().items()
        }
        tables = {n: {k: packed(v) for k, v in of.items()} for n, of in self.tables.state().items()}
        return [to_array(p) for p in self.shard.parameters.values()], kept, tables

    def snapshot(self, wait: bool = False) -> None:
        """Write the state into the server's folder. Without `wait`, write a copy in the background while the run goes
        on."""
        begun = time.monotonic()
        here = self.standing
        extra = {
            "job": self.job,
            "number": here.number,
            "next_piece": here.next_piece,
            "used": here.used,
            "unused": here.unused,
        }
        extra["tables"] = self.tables.state()
        Path(self.folder).mkdir(parents=True, exist_ok=True)
        saved_state.save(self.shard, self.folder, extra, 1, self._saver, wait)
        self._saved_at = time.monotonic()
        self._took = self._saved_at - begun

    def _done(self) -> None:
        """Count the update, advance the scheduler if it ended a step, and take a snapshot if one is due."""
        self.shard.advance(self.standing.step)
        since = time.monotonic() - self._saved_at
        if since >= max(_BETWEEN_SNAPSHOTS, self._took / _PART_FOR_SNAPSHOTS):
            self.snapshot()

    def _gradient(self, number: int, member: Member, push: object) -> Sequence[Any] | str:
        """The arrays of a push, or the reason why it is refused."""
        if member.job != self.job:
            return f"worker {member.worker} pushes for the job {member.job}, and this server is of {self.job}"
        if not 0 <= member.base < number:
            return f"worker {member.worker} pushes a gradient of version {member.base}, which does not exist"
        if member.number <= self.standing.used.get(member.worker, 0):
            return f"worker {member.worker} pushes its gradient {member.number} a second time"
        try:
            arrays = self.fetch(push)
        except Exception as error:  # whatever the transport raises for objects whose owner is gone
            return f"the gradient of worker {member.worker} is gone with it ({type(error).__name__})"
        if len(arrays) != len(self.pieces) + self.tables.num_arrays:
            there = f"{len(self.pieces)} variables and {len(self.table_specs)} tables"
            return f"worker {member.worker} pushes {len(arrays)} arrays, and there are {there}"
        for array, piece in zip(arrays, self.pieces, strict=False):
            if array is not None and (why := self.coding.misfit(array, piece)):
                return f"worker {member.worker} pushes a gradient of the wrong shape: {why}"
        if why := self.tables.misfit(arrays[len(self.pieces) :]):
            return f"worker {member.worker} pushes arrays that are not gradients: {why}"
        return arrays


class ServerActor(Server):
    """A server as an actor. Ray runs its calls one after the other, in the coordinator's order."""

    def __init__(
        self,
        job: str,
        pieces: Sequence[Piece],
        make_optimizer: OptimizerFactory,
        make_scheduler: SchedulerFactory | None,
        folder: str,
        tables: Sequence[TableSpec] = (),
        coding: Coding = Coding(),  # noqa: B008  (a frozen value)
    ) -> None:
        import ray

        torch.set_num_threads(1)
        keep_freed_memory()
        super().__init__(job, pieces, make_optimizer, make_scheduler, folder, ray.get, tables, coding)

    def where(self) -> Standing:
        """The server's position in the run."""
        return self.standing

    def pid(self) -> int:
        """The id of this process."""
        return os.getpid()
