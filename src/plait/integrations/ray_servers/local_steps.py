"""The computation of a worker that takes several steps of its own before it pushes: local SGD and DiLoCo with workers
that may join and leave.

A round begins with the servers' values. The worker pushes the change of the values over its steps, which is the
gradient of the servers' outer optimizer (for the papers see engine/local_sgd/diloco.py). The worker keeps the state of
its own optimizer; a worker that joins takes over the state in the last checkpoint.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from plait.comm.protocol import World
from plait.engine.checkpoint import load, snapshot
from plait.engine.checkpoint.checkpoint_folders import newest
from plait.engine.checkpoint.manifest import Manifest
from plait.engine.compiler import Captures, Compiler
from plait.engine.engine import Engine
from plait.engine.local_batch import num_tokens
from plait.engine.local_tensors import local_part
from plait.errors import CheckpointError
from plait.integrations.ray_servers.arrays import dtype_of, join_pieces, packed, to_array, to_tensor, views
from plait.integrations.ray_servers.messages import Task
from plait.integrations.ray_servers.server_job import Job, fingerprint_of, variables_of
from plait.integrations.ray_servers.tables.sparse_table import RowLookup
from plait.integrations.ray_servers.worker_gradients import BatchFeed, Gradient, PieceFeed


class LocalSteps:
    """One rank of a worker, with the interface of Computing. All ranks of a worker are given the same tasks."""

    def __init__(
        self, job: Job, world: World, feed: PieceFeed | BatchFeed | None = None, compiler: Compiler | None = None
    ) -> None:
        self.job, self.world = job, world
        plan = job.plan.inner_plan
        if compiler is None:
            compiler = Compiler(Captures(*job.make_model(), world.device), plan, job.layouts)
        self.fingerprint = fingerprint_of(variables_of(compiler.model), (), job.plan)
        self.feed = feed or PieceFeed(job, job.make_data()[0])
        self.engine = Engine(
            compiler, plan, world, job.optimizer, job.scheduler, seed=job.seed, clip_norm=job.clip_norm, on_nan="warn",
            scratch=job.scratch,
        )  # fmt: skip
        self.engine.prepare(self.feed.read(0))
        self._is_new = True

    def read(self, task: Task) -> tuple[Any, RowLookup]:
        """Return the first batch of a task, and begin to read the next. The lookup is empty: there are no tables."""
        return self.feed.read(task.piece, self._piece(task, 1) if task.num_steps > 1 else task.then), RowLookup({}, {})

    def compute(
        self, task: Task, first: tuple[Any, RowLookup], flats: Sequence[np.ndarray], rows: Sequence[Any] = ()
    ) -> Gradient:
        """Take the task's steps, beginning with the given values, each server's shard as bytes. The gradient is the
        change."""
        batch, _ = first
        self._catch_up(task.step)
        self._set_values(flats)
        losses, tokens, reading = [], 0, 0.0
        for index in range(task.num_steps):
            if index:
                since = time.perf_counter()
                after = self._piece(task, index + 1) if index + 1 < task.num_steps else task.then
                batch = self.feed.read(self._piece(task, index), after)
                reading += time.perf_counter() - since
            losses.append(float(self.engine.forward_backward(batch).loss))
            self.engine.optimizer_step()
            tokens += num_tokens(batch)
        state = snapshot.full_model(self.engine.executor)
        moments = self._moments() if task.saves else None
        if self.job.plan.moments == "reset":
            self._reset_moments()
        buffers = {n: to_array(value) for n, value in state.items() if n in self.engine.executor.buffers}
        changes = self._changes(flats, state)
        return Gradient(sum(losses) / len(losses), 1.0, tokens, changes, buffers, reading, moments)

    def close(self) -> None:
        """Stop reading data, and free what the engine keeps on disk."""
        self.feed.close()
        self.engine.close()

    def _piece(self, task: Task, index: int) -> int:
        """The piece of a task's batch `index`."""
        return task.piece + index * self.job.num_parts

    def _set_values(self, flats: Sequence[np.ndarray]) -> None:
        """Set the parameters to the servers' values."""
        executor = self.engine.executor
        for name, whole in join_pieces(flats, self.job.shards).items():
            if name in executor.parameters:
                executor.set_local(name, local_part(whole, executor.layouts[name], self.world).to(self.world.device))
        executor.updated()

    def _changes(self, flats: Sequence[np.ndarray], state: dict[str, Tensor]) -> tuple[list[np.ndarray | None], ...]:
        """For every server, an array per piece: the value before less the value after."""
        found = []
        for flat, pieces in zip(flats, self.job.shards, strict=True):
            arrays: list[np.ndarray | None] = []
            for piece, before in zip(pieces, views(to_tensor(flat), pieces), strict=True):
                after = state[piece.name]
                after = after[piece.start : piece.stop] if piece.shape else after
                arrays.append(to_array(before - after.to(dtype_of(piece))))
            found.append(arrays)
        return tuple(found)

    def _catch_up(self, step: int) -> None:
        """Advance to this step of the run, which decides the learning rate and the random draws."""
        state = self.engine.state
        if self._is_new and step > 0:
            self._load_moments()
        self._is_new = False
        while state.step_number < step:
            state.step_number += 1
            if state.scheduler is not None:
                with warnings.catch_warnings():  # torch warns that the optimizer has not stepped before its scheduler
                    warnings.simplefilter("ignore", UserWarning)
                    state.scheduler.step()

    def _moments(self) -> dict[str, dict[str, Any]]:
        """The full state of the worker's own optimizer. All ranks must call it."""
        kept = snapshot.take(self.engine.state)["optimizer"]["state"]
        return {
            name: {key: packed(v.full_tensor() if hasattr(v, "full_tensor") else v) for key, v in of.items()}
            for name, of in kept.items()  # a DTensor if ranks share the state
        }

    def _reset_moments(self) -> None:
        assert self.engine.state.optimizer is not None
        for kept in self.engine.state.optimizer.state.values():
            for value in kept.values():
                if torch.is_tensor(value):
                    value.zero_()

    def _load_moments(self) -> None:
        """Load the optimizer state of the newest checkpoint, if this run wrote it or continues from it."""
        try:
            found = newest(self.job.folder)
            extra = Manifest.read(found).values["common"]["extra"]
            if self.job.resume or extra.get("job") == self.job.name:
                load.load(self.engine.state, str(found))
        except CheckpointError as error:
            warnings.warn(f"the worker begins with moments of its own: {error}", stacklevel=2)
