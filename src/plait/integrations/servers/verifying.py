"""Runs a plan with parameter servers for `verify`: in this process, and as the serial program that defines it."""

from __future__ import annotations

import copy
import dataclasses
import functools
import tempfile
from typing import Any

from torch import nn

from plait.comm.protocol import World
from plait.comm.threads import run_ranks
from plait.compile.capture.capture import LossFn
from plait.engine.compiler import Compiler
from plait.engine.local_batch import num_rows
from plait.errors import PlanError, Refusal
from plait.integrations.servers.feed import BatchFeed
from plait.integrations.servers.one_process import of_each_worker, run_in_one_process
from plait.integrations.servers.prepare import make_job
from plait.integrations.servers.serial import SerialServers
from plait.integrations.servers.service import Job, make_consistency
from plait.integrations.servers.tables.module import tables_of
from plait.plan.plan import Plan
from plait.reference.differences import RunResult
from plait.schedule.consistency import drawn_order


class ServedCheck:
    """Both runs of one plan on one batch, for `steps` steps or as many rounds as contain them.

    Pushes come in a random order, in which workers are out of step as far as the plan allows. The losses of a run are
    those of its pushes. Raises PlanError for a model with sparse tables, and for a plan, batch or optimizer that
    servers cannot run.
    """

    def __init__(self, plan: Plan, compiler: Compiler, batch: Any, steps: int, **given: Any) -> None:
        model, rows = compiler.model, num_rows(batch)
        if tables := tables_of(model):
            what = f"verify runs no tables on servers, and the model has {', '.join(tables)}"
            other = str(plan.inner_plan) or "data=2"
            raise PlanError(Refusal(what, "", f"check the plan {other!r}, under which they are embeddings"))
        self._compiler, self._batch, self._model = compiler, batch, model
        self.job: Job = make_job(
            plan, make_model=functools.partial(_copied, model, compiler.loss_fn), make_data=lambda: (None, None),
            num_items=rows, batch_size=rows, steps=steps, out="", folder="", **given,
        )  # fmt: skip
        num_rounds = -(-steps // self.job.steps_each)
        consistency = make_consistency(self.job)
        self._order = drawn_order(consistency, num_rounds * consistency.updates_per_step, self.job.seed)

    @property
    def first_batch(self) -> Any:
        """The first batch that a worker computes on."""
        return BatchFeed(self._batch, self.job.num_parts).read(0)

    def in_one_process(self) -> RunResult:
        """The run with servers, in one process: ranks of a worker are threads, each with servers of its own."""
        with tempfile.TemporaryDirectory(prefix="plait-verify-") as folder:

            def rank(world: World) -> RunResult:
                job = dataclasses.replace(self.job, out=f"{folder}/{world.rank}")
                feed = BatchFeed(self._batch, job.num_parts)
                computing = of_each_worker(job, world, feed=feed, compiler=self._compiler)
                found = run_in_one_process(job, self._order, computing)
                return RunResult(list(found.losses), {}, found.values, {})

            return run_ranks(self.job.plan.inner_plan.mesh, rank, algorithm=self.job.plan.allreduce, strict=True)[0]

    def serial(self, twin: nn.Module, plan: Plan, batch: Any) -> RunResult:
        """The serial run on one device, from the values of `twin`, a copy of the model; `plan` gives the precision."""
        make_model = functools.partial(_copied, twin, self._compiler.loss_fn)
        losses, values = SerialServers(dataclasses.replace(self.job, plan=plan, make_model=make_model), batch).run(
            self._order
        )
        return RunResult(losses, {}, values, {})


def _copied(model: nn.Module, loss_fn: LossFn) -> tuple[nn.Module, LossFn]:
    return copy.deepcopy(model), loss_fn
