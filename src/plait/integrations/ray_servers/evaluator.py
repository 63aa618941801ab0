"""The evaluator: it follows the checkpoints of a run, and evaluates the newest on held-out data."""

from __future__ import annotations

import os
from itertools import islice

import torch

from plait.comm.process_world import process_world
from plait.compile.capture.loss_values import loss_and_aux
from plait.engine.checkpoint.checkpoint_folders import newest
from plait.engine.checkpoint.load import load_weights
from plait.engine.checkpoint.manifest import Manifest
from plait.engine.compiler import Captures, Compiler
from plait.engine.data.loader import Loader
from plait.engine.engine import Engine
from plait.errors import CheckpointError
from plait.integrations.ray_servers.server_job import Job
from plait.plan.plan import Plan


class Evaluator:
    """An actor. It evaluates one checkpoint at a time, and skips those that have been superseded meanwhile."""

    def __init__(self, job: Job) -> None:
        torch.set_num_threads(job.num_threads)
        self._job = job
        model, loss_fn = job.make_model()
        plan = Plan(precision=job.plan.precision, exceptions=job.plan.exceptions)
        world = process_world(plan.mesh)
        compiler = Compiler(Captures(model, loss_fn, world.device), plan)
        self._engine = Engine(compiler, plan, world, None, seed=job.seed, adopt=True)
        _, held_out = job.make_data()
        self._loader = Loader(held_out, job.batch_size, shuffle=False, seed=job.seed, plan=plan, world=world)
        self._begin = self._loader.state_dict()
        self._seen = -1

    def look(self) -> tuple[int, float] | None:
        """Evaluate the newest checkpoint. Returns (step, loss), or None if it was evaluated before."""
        self._loader.load_state_dict(self._begin)
        if not self._engine.is_prepared:
            self._engine.prepare(next(iter(self._loader)))
            self._loader.load_state_dict(self._begin)
        while True:
            folder = newest(self._job.folder)
            try:
                step = Manifest.read(folder).step
                if step <= self._seen:
                    return None
                load_weights(self._engine.state, str(folder))
                break
            except CheckpointError:
                if str(newest(self._job.folder)) == str(folder):  # otherwise a newer one has replaced it meanwhile
                    raise
        self._seen = step
        loss, _ = loss_and_aux(self._engine.evaluate(islice(self._loader, self._job.evaluate_batches)))
        return step, loss

    def pid(self) -> int:
        """The id of this process."""
        return os.getpid()
