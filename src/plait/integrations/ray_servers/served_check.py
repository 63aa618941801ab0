"""Runs a plan with parameter servers for `verify`: in this process, and as the serial program that defines it.

In one process the order of pushes is given. Servers, workers' computation and consistency protocol are those of a real
run; only the waiting is left out.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor, nn

from plait.comm.process_world import process_world
from plait.comm.protocol import World
from plait.comm.thread_world import run_ranks
from plait.compile.capture.capture import LossFn
from plait.engine.compiler import Compiler
from plait.engine.local_batch import num_rows
from plait.errors import PlanError, Refusal
from plait.integrations.ray_servers.full_model import FullModel
from plait.integrations.ray_servers.local_steps import LocalSteps
from plait.integrations.ray_servers.messages import Task
from plait.integrations.ray_servers.push_compression import Encoder
from plait.integrations.ray_servers.serial import SerialServers
from plait.integrations.ray_servers.server import Member, Server, Standing, UpdateOrder
from plait.integrations.ray_servers.server_job import Job, make_consistency, make_job
from plait.integrations.ray_servers.tables.sparse_table import RowLookup, tables_of
from plait.integrations.ray_servers.worker_gradients import BatchFeed, Computing
from plait.plan.plan import Plan
from plait.reference.differences import RunResult
from plait.schedule.consistency import Commit, Consistency, Go, Push, Refuse, drawn_order
from plait.schedule.work_queue import WorkQueue

Computings = list[Computing] | list[LocalSteps]


@dataclass(frozen=True)
class OneProcessRun:
    """The result of a run in one process.

    values   the final values, by variable name
    losses   the loss of every push, in order
    commits  every update
    tables   by table: ids, values and optimizer state
    """

    values: dict[str, Tensor]
    losses: tuple[float, ...]
    commits: tuple[Commit, ...]
    tables: dict[str, dict[str, Tensor]]


def run_in_one_process(job: Job, order: Sequence[int], computing: Computings | None = None) -> OneProcessRun:
    """Run the job's plan, with worker `order[k]` making push k.

    `computing` has the computation of each worker, as `of_each_worker` makes it. If a worker has several ranks, each
    rank runs all of this with its own computation. Raises PlanError if the order is impossible under the plan.
    """
    return _Run(dataclasses.replace(job, order=tuple(order)), computing).run()


@dataclass(frozen=True)
class _Begun:
    """A task whose values are arrays, with its batch and the table rows as they were when the task was given."""

    task: Task
    batch: tuple[Any, RowLookup]
    rows: list[list[np.ndarray]]


class _Run:
    def __init__(self, job: Job, computing: Computings | None) -> None:
        self.job = job
        self.computing = computing or of_each_worker(job, process_world(job.plan.inner_plan.mesh, device="cpu"))
        self.encoders = [Encoder(job.coding, job.shards) for _ in range(job.plan.workers)]
        full_model = FullModel(job)
        self.servers = [
            Server(
                job.name, pieces, job.server_optimizer, job.server_scheduler, f"{job.out}/servers/{index}",
                table_specs=job.tables, coding=job.coding,
            )
            for index, pieces in enumerate(job.shards)
        ]  # fmt: skip
        for index, (server, pieces) in enumerate(zip(self.servers, job.shards, strict=True)):
            server.start(full_model.values(pieces), full_model.state(index), Standing(0))
        self.handout = WorkQueue(0, job.num_parts, job.steps_each)
        self.tasks: dict[int, list[_Begun]] = {worker: [] for worker in range(job.plan.workers)}
        self.pushes: dict[int, tuple[int, list[list[np.ndarray | None]]]] = {}
        self.commits: list[Commit] = []
        self.step = 0

    def run(self) -> OneProcessRun:
        job = self.job
        consistency = make_consistency(job)
        losses = []
        for worker in range(job.plan.workers):
            self._carry_out(consistency, consistency.join(worker))
        for worker in job.order:
            if not self.tasks[worker]:
                raise PlanError(
                    f"the order has worker {worker} push while it waits for others under the plan {job.plan}"
                )
            begun, computing = self.tasks[worker].pop(0), self.computing[worker]
            task = begun.task
            found = computing.compute(task, begun.batch, task.values, begun.rows)
            push = self.encoders[worker].encode(found.arrays)
            self.pushes[worker] = (task.version, [[None if a is None else a.copy() for a in each] for each in push])
            self.handout.used(worker, task.piece)
            losses.append(found.loss)
            self._carry_out(consistency, consistency.push(Push(worker, task.version, found.weight)))
        for each in {id(each): each for each in self.computing}.values():
            each.close()
        full_model = FullModel(job)
        full_model.join([server.state() for server in self.servers])
        values = {name: p.detach() for name, p in full_model.shard.parameters.items()}
        return OneProcessRun(values, tuple(losses), tuple(self.commits), full_model.tables)

    def _carry_out(self, consistency: Consistency, decisions: Sequence[object]) -> None:
        for decision in decisions:
            if isinstance(decision, Commit):
                self._commit(decision)
            elif isinstance(decision, Refuse):
                raise PlanError(decision.why)
        given = self.handout.give([decision.worker for decision in decisions if isinstance(decision, Go)])
        for worker, piece, then in given:
            values = tuple(server.read().copy() for server in self.servers)
            task = Task(consistency.version, piece, then, values, self.step, self.job.steps_each)
            batch = self.computing[worker].read(task)
            rows = [server.pull(batch[1].wanted(index)) for index, server in enumerate(self.servers)]
            self.tasks[worker].append(_Begun(task, batch, rows))

    def _commit(self, commit: Commit) -> None:
        self.commits.append(commit)
        self.step += commit.ends_step * self.job.steps_each
        taken = [self.pushes.pop(worker) for worker in commit.members]
        members = tuple(
            Member(worker, commit.number, share, base, self.job.name)
            for worker, share, (base, _) in zip(commit.members, commit.shares, taken, strict=True)
        )
        clip = None if self.job.is_local or self.job.plan.staleness != 0 else self.job.clip_norm
        order = UpdateOrder(commit.number, self.step, members, 0, clip is not None)
        dones = [
            server.update(order, [arrays[index] for _, arrays in taken]) for index, server in enumerate(self.servers)
        ]
        if clip is not None:
            norm = math.sqrt(sum(done.square for done in dones))
            for server in self.servers:
                server.finish(commit.number, min(1.0, clip / (norm + 1e-6)))


def of_each_worker(job: Job, world: World, **given: Any) -> Computings:
    """The computation of each worker, on one rank. Workers without state of their own share one."""
    if job.is_local:
        return [LocalSteps(job, world, **given) for _ in range(job.plan.workers)]
    return [Computing(job, world, **given)] * job.plan.workers


class ServedCheck:
    """Both runs of one plan on one batch, for `steps` steps or as many rounds as contain them.

    Pushes come in a random order, in which workers are out of step as far as the plan allows. The losses of a run are
    those of its pushes. Raises PlanError for a model with sparse tables, and for a plan, batch or optimizer that
    servers cannot run.
    """

    def __init__(self, plan: Plan, compiler: Compiler, batch: Any, steps: int, **given: object) -> None:
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
