"""What a worker computes: gradients of its own model on values that it is given, under the plan that it trains by."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from plait.backends.eager.offload.store import Offload
from plait.comm.device import is_host
from plait.comm.protocol import World
from plait.compile.capture.batch import batch_tensors
from plait.engine.checkpoint.snapshot import persistent_buffers
from plait.engine.checks import check_captured
from plait.engine.compiler import Captures, Compiler
from plait.engine.eager import EagerExecutor, refuse_unless_data_only
from plait.engine.local_batch import num_rows
from plait.engine.microbatch import step_key
from plait.engine.rank_executor import RankExecutor
from plait.engine.state import is_whole, local_part
from plait.errors import CaptureError
from plait.integrations.servers.arrays import to_array, wholes
from plait.integrations.servers.feed import BatchFeed, PieceFeed
from plait.integrations.servers.notes import Task
from plait.integrations.servers.service import Job, fingerprint_of, variables_of
from plait.integrations.servers.tables.local import LocalTables, RowLookup
from plait.integrations.servers.tables.module import specs_of, tables_away


@dataclass(frozen=True)
class Gradient:
    """Of a piece: the mean loss, its weight among others, and what is pushed to every server: an array for each of its
    pieces, None where there is none, and then of every table ids and their gradients."""

    loss: float
    weight: float
    tokens: int
    arrays: tuple[list[np.ndarray | None], ...]
    buffers: dict[str, np.ndarray]
    reading: float = 0.0  # seconds that it waited for data, but for its first batch
    moments: Any = None  # what the worker's own optimizer keeps, where the task asked for it


class Computing:
    """One rank of a worker. All ranks of a worker are given the same values and tasks.

    `feed` is another one than the job's data has; `compiler` is shared with others that compute the same.
    """

    def __init__(
        self, job: Job, world: World, feed: PieceFeed | BatchFeed | None = None, compiler: Compiler | None = None
    ) -> None:
        self.job = job
        self.world = world
        within, adopt = job.plan.inner_plan, compiler is None
        if compiler is None:
            with tables_away():
                made = job.make_model()
            compiler = Compiler(Captures(*made, world.device), within, job.layouts)
        model, loss_fn = compiler.model, compiler.loss_fn
        self.feed = feed or PieceFeed(job, job.make_data()[0])
        self.fingerprint = fingerprint_of(variables_of(model), specs_of(model), job.plan)
        self.tables = LocalTables(model, len(job.shards))
        first = self.feed.read(0)
        self.tables.size_for(first)
        self.homes = Offload(within, world, job.scratch)
        self._persistent = persistent_buffers(model)
        self._taken: set[str] = set()  # parameters whose memory is that of the values they were last given
        self.executor: RankExecutor | EagerExecutor
        try:
            self.executor = RankExecutor(compiler, world, self.tables.localised(first)[0], job.seed, adopt, self.homes)
            check_captured(compiler, job.plan, self.executor.lowered.captured)
        except CaptureError as error:
            refuse_unless_data_only(error, within, world, compiler, first)
            warnings.warn(f"the model runs as it is, not as a graph: {error}", stacklevel=2)
            self.executor = EagerExecutor(model, loss_fn, within, world)

    def read(self, task: Task) -> tuple[Any, RowLookup]:
        """The batch of a task, and the rows of tables that it wants; the next one's is read meanwhile."""
        return self.tables.localised(self.feed.read(task.piece, task.then))

    def compute(
        self,
        task: Task,
        batch: tuple[Any, RowLookup],
        flats: Sequence[np.ndarray],
        rows: Sequence[Sequence[np.ndarray]] = (),
    ) -> Gradient:
        """Forward and backward on what was read, with these values: each server's shard as bytes, which must stay as
        they are, and of every server the rows of its tables that the batch wants."""
        self._take(flats, self.tables.weights(batch[1], rows))
        return self._gradient(*batch, task.piece)

    def _take(self, flats: Sequence[np.ndarray], weights: dict[str, Tensor]) -> None:
        for name, value in (weights | wholes(flats, self.job.shards)).items():
            self._set(name, value)
        self.executor.updated()

    def _gradient(self, batch: Any, lookup: RowLookup, piece: int) -> Gradient:
        result = self.executor.run(batch, step_key(self.job.seed, piece))
        found = self._whole(result.gradients)
        if self.job.clip_norm is not None and self.job.plan.staleness != 0:
            _clip(list(found.values()), self.job.clip_norm)
        weight = float(result.parts[1]) if result.parts is not None else float(num_rows(batch))
        persistent = {n: to_array(b).copy() for n, b in self.executor.buffers.items() if n in self._persistent}
        pushes = self.tables.pushes(lookup, found)
        arrays = tuple([*dense, *rows] for dense, rows in zip(self._arrays(found), pushes, strict=True))
        return Gradient(float(result.loss), weight, num_tokens(batch), arrays, persistent)

    def close(self) -> None:
        self.feed.close()
        self.homes.close()

    def _set(self, name: str, whole: Tensor) -> None:
        """Give a parameter new values. Where it is whole and in this memory, by taking theirs for its own."""
        replica = self.executor
        if isinstance(replica, EagerExecutor):
            replica.parameters[name].data = whole
            return
        inputs, own = replica.variables.inputs, replica.parameters.get(name)
        alone = self.world.mesh.size == 1 and is_host(self.world.device) and is_whole(replica.layouts[name])
        if alone and name in inputs and (inputs[name] is own or name in self._taken):
            self._taken.add(name)
            inputs[name] = whole
        elif name in replica.parameters:
            replica.set_local(name, local_part(whole, replica.layouts[name], self.world).to(self.world.device))

    def _whole(self, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        """The gradient of every variable, whole; all ranks of a worker call it."""
        if self.world.mesh.size == 1 and not self.homes.norms:
            return dict(gradients)
        self.executor.set_gradients(gradients)
        found = self.executor.whole_gradients()
        for parameter in self.executor.parameters.values():
            parameter.grad = None
        return found

    def _arrays(self, gradients: dict[str, Tensor]) -> tuple[list[np.ndarray | None], ...]:
        whole = {name: to_array(gradient) for name, gradient in gradients.items()}
        return tuple(
            [
                None if (g := whole.get(piece.name)) is None else g[piece.start : piece.stop] if piece.shape else g
                for piece in pieces
            ]
            for pieces in self.job.shards
        )


def num_tokens(batch: Any) -> int:
    """Elements of the widest integer tensor of the batch, or its rows where it has none."""
    leaves = batch_tensors(batch)
    widest = max((leaf.numel() for leaf in leaves if leaf.ndim > 1 and not leaf.is_floating_point()), default=0)
    return widest or num_rows(batch)


def _clip(gradients: list[Tensor], limit: float) -> None:
    """Scale gradients in place to a 2-norm of at most `limit`, as the Trainer does."""
    norm = math.sqrt(sum(float(n.double().square()) for n in torch._foreach_norm(gradients)))
    if (scale := limit / (norm + 1e-6)) < 1:
        torch._foreach_mul_(gradients, scale)
