"""The computation of a worker: gradients of its model at the servers' values, under the plan of one worker.

The pieces of the data are read ahead of their use. A piece has the same rows whichever worker it goes to.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate

from plait.comm.protocol import World
from plait.engine.checkpoint.snapshot import persistent_buffers
from plait.engine.compiler import Captures, Compiler
from plait.engine.data.batch_reader import BatchReader
from plait.engine.data.sample_order import BatchRows, Order
from plait.engine.engine import Engine
from plait.engine.local_batch import batch_part, num_rows, num_tokens
from plait.engine.setup_checks import check_captured
from plait.integrations.ray_servers.arrays import join_pieces, to_array
from plait.integrations.ray_servers.messages import Task
from plait.integrations.ray_servers.server_job import Job, fingerprint_of, variables_of
from plait.integrations.ray_servers.tables.sparse_table import LocalTables, RowLookup, specs_of, tables_away


class BatchFeed:
    """A feed that returns the pieces of one batch, which every step trains on. It replaces a PieceFeed in tests and
    `verify`."""

    def __init__(self, batch: Any, num_parts: int) -> None:
        self._batch, self._num_parts = batch, num_parts

    def read(self, piece: int, then: int | None = None) -> Any:
        """The rows of the given piece; `then` is ignored."""
        return batch_part(self._batch, piece % self._num_parts, self._num_parts)

    def close(self) -> None:
        """Nothing to do."""


class PieceFeed:
    """Reads pieces by number (see schedule/work_queue.py). An epoch is in the same order as that of `plait.loader`."""

    def __init__(self, job: Job, dataset: Any, collate: Callable[[list[Any]], Any] = default_collate) -> None:
        self._job = job
        self._reader = BatchReader(dataset, collate, job.seed, 0)
        self._epoch: tuple[int, torch.Tensor] = (-1, torch.empty(0))
        self._thread = ThreadPoolExecutor(1, "plait feed")
        self._ahead: dict[int, Future[Any]] = {}

    def read(self, piece: int, then: int | None = None) -> Any:
        """Return the batch of a piece, and begin to read the piece `then`."""
        found = self._ahead.pop(piece, None) or self._thread.submit(self._read, piece)
        self._ahead = {} if then is None else {then: self._thread.submit(self._read, then)}
        return found.result()

    def close(self) -> None:
        """Stop the reading thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _read(self, piece: int) -> Any:
        return self._reader.read(self.rows(piece))

    def rows(self, piece: int) -> BatchRows:
        """The items of the dataset that make up the piece."""
        job = self._job
        batch, part = divmod(piece, job.num_parts)
        epoch, index = divmod(batch, job.num_items // job.batch_size)
        if self._epoch[0] != epoch:
            whole = Order(job.num_items, job.num_items, True, job.seed)
            self._epoch = (epoch, torch.tensor(next(whole.rows_from(epoch, 0)).items))
        items = self._epoch[1][index * job.batch_size : (index + 1) * job.batch_size]
        mine = items.view(job.plan.micro, job.num_parts, -1)[:, part]
        return BatchRows(epoch, tuple(mine.flatten().tolist()))


@dataclass(frozen=True)
class Gradient:
    """The result of a worker's computation on a piece of the data.

    loss     the mean loss of the piece
    weight   its weight in the mean over pieces: the number of rows, or the weight of a plait.Weighted
    tokens   the number of tokens in the piece, or of rows if it has no tokens
    arrays   the push to each server: an array per piece of the variables, None if the loss does not depend on it; then
             for each table the ids and their gradients
    buffers  the persistent buffers after the step, by name
    reading  seconds spent waiting for data, without the first batch
    moments  the state of the worker's own optimizer, if the task asked for it
    """

    loss: float
    weight: float
    tokens: int
    arrays: tuple[list[np.ndarray | None], ...]
    buffers: dict[str, np.ndarray]
    reading: float = 0.0
    moments: Any = None


class Computing:
    """One rank of a worker. All ranks of a worker are given the same values and tasks.

    `feed` replaces the feed of the job's data; `compiler` may be shared with workers that compute the same.
    """

    def __init__(
        self, job: Job, world: World, feed: PieceFeed | BatchFeed | None = None, compiler: Compiler | None = None
    ) -> None:
        self.job = job
        self.world = world
        inner_plan, adopt = job.plan.inner_plan, compiler is None
        if compiler is None:
            with tables_away():
                made = job.make_model()
            compiler = Compiler(Captures(*made, world.device), inner_plan, job.layouts)
        model = compiler.model
        self.feed = feed or PieceFeed(job, job.make_data()[0])
        self.fingerprint = fingerprint_of(variables_of(model), specs_of(model), job.plan)
        self.tables = LocalTables(model, len(job.shards))
        first = self.feed.read(0)
        self.tables.size_for(first)
        self._persistent = persistent_buffers(model)
        self.engine = Engine(
            compiler, inner_plan, world, None, seed=job.seed, on_nan="warn", adopt=adopt, scratch=job.scratch
        )  # fmt: skip
        self.engine.prepare(self.tables.localise(first)[0])
        if (compiled := self.engine.executor.compiled) is not None:
            check_captured(compiler, job.plan, compiled.program.captured)

    def read(self, task: Task) -> tuple[Any, RowLookup]:
        """The batch of a task, and the table rows that it needs. Begins to read the next batch."""
        return self.tables.localise(self.feed.read(task.piece, task.then))

    def compute(
        self,
        task: Task,
        batch: tuple[Any, RowLookup],
        flats: Sequence[np.ndarray],
        rows: Sequence[Sequence[np.ndarray]] = (),
    ) -> Gradient:
        """Run forward and backward on a batch that `read` returned.

        `flats` are the values, each server's shard as bytes, which are not written to. `rows` has for each server the
        rows of its tables that the batch needs.
        """
        self._set_values(flats, self.tables.weights(batch[1], rows))
        return self._gradient(*batch, task.piece)

    def _set_values(self, flats: Sequence[np.ndarray], weights: dict[str, Tensor]) -> None:
        for name, value in (weights | join_pieces(flats, self.job.shards)).items():
            self.engine.executor.set_whole(name, value)
        self.engine.executor.updated()

    def _gradient(self, batch: Any, lookup: RowLookup, piece: int) -> Gradient:
        self.engine.state.step_number = piece  # decides the random draws
        loss = self.engine.forward_backward(batch)
        found = self._gradients()
        if self.job.clip_norm is not None and self.job.plan.staleness != 0:
            _clip(list(found.values()), self.job.clip_norm)
        weight = float(num_rows(batch) if loss.weight is None else loss.weight)
        buffers = self.engine.executor.buffers
        persistent = {n: to_array(b).copy() for n, b in buffers.items() if n in self._persistent}
        pushes = self.tables.pushes(lookup, found)
        arrays = tuple([*dense, *rows] for dense, rows in zip(self._arrays(found), pushes, strict=True))
        return Gradient(float(loss.loss), weight, num_tokens(batch), arrays, persistent)

    def close(self) -> None:
        """Stop reading data, and free what the engine keeps on disk."""
        self.feed.close()
        self.engine.close()

    def _gradients(self) -> dict[str, Tensor]:
        """The full gradient of every variable, by name. All ranks of a worker must call it."""
        executor = self.engine.executor
        if self.world.mesh.size > 1 or self.engine.offload.norms:
            found = self.engine.gradients()
        else:
            found = {name: p.grad for name, p in executor.parameters.items() if p.grad is not None}
        self.engine.zero_grad()
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


def _clip(gradients: list[Tensor], limit: float) -> None:
    """Scale gradients in place to a total 2-norm of at most `limit`, as the Trainer does."""
    norm = math.sqrt(sum(float(n.double().square()) for n in torch._foreach_norm(gradients)))
    if (scale := limit / (norm + 1e-6)) < 1:
        torch._foreach_mul_(gradients, scale)
