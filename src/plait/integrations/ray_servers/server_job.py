"""The description of a run with parameter servers, which every process receives: functions that build model, data and
optimizer, and the settings of the run. It is made from a plan and the user's settings: variables are found, and
assigned to servers.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from plait.compile.ir.dtypes import torch_name
from plait.engine.rank_optimizers import OptimizerFactory, SchedulerFactory
from plait.errors import PlanError, UnevenBatchError
from plait.integrations.ray_servers.push_compression import Coding
from plait.integrations.ray_servers.tables.sparse_table import tables_of
from plait.integrations.ray_servers.tables.table_shard import TableSpec
from plait.plan.annotation import Annotations
from plait.plan.legality import of_rows, refusals
from plait.plan.plan import Plan
from plait.plan.step_facts import StepFacts
from plait.schedule.consistency import Consistency
from plait.schedule.variable_placement import Piece, Variable

if TYPE_CHECKING:  # the compiler is only needed by workers, and takes seconds to import
    from plait.compile.capture.capture import LossFn
import dataclasses
import uuid

from plait.errors import Refusal
from plait.integrations.ray_servers.optimizer_shard import may_cut
from plait.integrations.ray_servers.tables.sparse_table import specs_of, tables_away
from plait.schedule.variable_placement import place_variables


class NoLog:
    """A metrics log that discards everything."""

    def __init__(self, first_step: int) -> None:
        pass

    def write(self, values: dict[str, Any]) -> None:
        pass

    def close(self) -> None:
        pass


@dataclass(frozen=True)
class Job:
    """One run. The functions are called in the processes that need their results, and must be importable there.

    name          drawn anew for each run: pushes of other runs are refused
    make_model    () -> (model, loss_fn), with the same values in every process
    make_data     () -> (training data, evaluation data or None), map-style datasets
    num_items     the number of items of the training data
    batch_size    rows of a step: one push of every worker, whatever the mode
    out           the folder of metrics and of the servers' own snapshots
    folder        the folder of checkpoints
    shards        the pieces of each server
    make_log      first step -> log of the metrics of each step (api.job.metrics.MetricsLog); discards them by default
    begins_at     with `resume`: the checkpoint to continue from, or a folder whose newest checkpoint is used
    order         the worker of each push in turn, for a run that is to be reproduced
    """

    name: str
    plan: Plan
    make_model: Callable[[], tuple[nn.Module, LossFn]]
    make_data: Callable[[], tuple[Any, Any]]
    optimizer: OptimizerFactory
    num_items: int
    batch_size: int
    steps: int
    out: str
    folder: str
    variables: tuple[Variable, ...]
    shards: tuple[tuple[Piece, ...], ...]
    tables: tuple[TableSpec, ...] = ()
    make_log: Callable[[int], Any] = NoLog
    scheduler: SchedulerFactory | None = None
    layouts: Annotations | None = None
    seed: int = 0
    clip_norm: float | None = None
    save_every: int = 0
    evaluate_every: int = 0
    evaluate_batches: int = 8
    keep: int = 2
    resume: bool = False
    begins_at: str = ""
    on_nan: str = "raise"
    scratch: str | None = None
    order: tuple[int, ...] = ()
    num_threads: int = 1

    @property
    def num_parts(self) -> int:
        """The number of pieces of work that a batch is cut into: one for each push of a step."""
        return self.plan.workers - self.plan.backup

    @property
    def coding(self) -> Coding:
        """The compression of pushed gradients."""
        return Coding(self.plan.compress, self.plan.exempt)

    @property
    def is_local(self) -> bool:
        """Whether workers take steps of their own with the job's optimizer, and servers update by the mean of their
        changes."""
        return self.plan.sync != 1

    @property
    def steps_each(self) -> int:
        """Steps of a worker between two pushes; before the last push there may be fewer."""
        assert isinstance(self.plan.sync, int)
        return self.plan.sync

    @property
    def server_optimizer(self) -> OptimizerFactory:
        """The optimizer of the servers: with `is_local` the outer optimizer, whose gradient is the mean change."""
        if not self.is_local:
            return self.optimizer
        lr, momentum = self.plan.outer_rates
        return functools.partial(torch.optim.SGD, lr=lr, momentum=momentum, nesterov=self.plan.outer == "nesterov")

    @property
    def server_scheduler(self) -> SchedulerFactory | None:
        """The learning-rate scheduler of the servers; None with `is_local`, when workers have it."""
        return None if self.is_local else self.scheduler

    @property
    def server_names(self) -> list[str]:
        """The Ray actor names of the servers."""
        return [f"plait-{self.name}-server-{index}" for index in range(len(self.shards))]

    @property
    def fingerprint(self) -> Fingerprint:
        """The fingerprint of the run's model."""
        return fingerprint_of(self.variables, self.tables, self.plan)


@dataclass(frozen=True)
class Fingerprint:
    """Identifies the model of a worker: name, shape and dtype of every variable, and the plan of one worker."""

    variables: tuple[tuple[str, tuple[int, ...], str], ...]
    plan: str

    @property
    def digest(self) -> str:
        """A short hash of the fingerprint, 16 hexadecimal digits."""
        return hashlib.sha256(json.dumps([self.variables, self.plan]).encode()).hexdigest()[:16]

    def difference(self, other: Fingerprint) -> str:
        """The first difference of `other` from this fingerprint, in words; empty if they are equal."""
        if self.plan != other.plan:
            return f"its plan is {other.plan or 'one device'!r} and the run's {self.plan or 'one device'!r}"
        mine, theirs = ({v[0]: v[1:] for v in each.variables} for each in (self, other))
        for name, (shape, dtype) in mine.items():
            if name not in theirs:
                return f"it has no {name}, of shape {list(shape)}"
            if theirs[name] != (shape, dtype):
                there = theirs[name]
                return f"its {name} is {there[1]}{list(there[0])} and the run's {dtype}{list(shape)}"
        extra = sorted(theirs.keys() - mine.keys())
        return f"it has {extra[0]}, which the run's model lacks" if extra else ""


def make_consistency(job: Job) -> Consistency:
    """The job's consistency protocol, before any worker has joined."""
    plan = job.plan
    return Consistency(plan.workers, plan.staleness, plan.backup, order=job.order, overlap=plan.overlap)


def fingerprint_of(variables: Sequence[Variable], tables: Sequence[TableSpec], plan: Plan) -> Fingerprint:
    """The fingerprint of a model with these variables and tables, under the plan of one worker."""
    rows = tuple((table.name, (table.dim,), f"rows by {table.optimizer} of ") for table in tables)
    return Fingerprint((*((v.name, v.shape, v.dtype) for v in variables), *rows), str(plan.inner_plan))


def variables_of(model: nn.Module) -> tuple[Variable, ...]:
    """The variables that servers hold: the trained parameters, except those of tables."""
    tables = {f"{name}.weight" for name in tables_of(model)}
    return tuple(
        Variable(name, tuple(p.shape), torch_name(p.dtype), p.numel() * p.element_size())
        for name, p in model.named_parameters()
        if p.requires_grad and name not in tables
    )


def check_plan(plan: Plan, batch_size: int) -> None:
    """Check that the plan and the batch can run with parameter servers.

    Raises PlanError or BatchError, which name what would run.
    """
    from plait.compile.stages.split import (
        updates_within,  # imports the compiler, which only the user's process needs for this check
    )

    for refusal in refusals(plan, StepFacts(updates_within=updates_within(plan.inner_plan))):
        raise PlanError(refusal)
    for refusal in of_rows(plan, batch_size):
        raise UnevenBatchError(refusal)


def make_job(plan: Plan, **given: Any) -> Job:
    """The job of a run. `given` are the fields of Job, except name, variables, tables and shards.

    Raises PlanError or BatchError for a plan, a batch or an optimizer that cannot run with parameter servers.
    """
    check_plan(plan, given["batch_size"])
    model = _on_meta(given["make_model"])
    variables, tables = variables_of(model), specs_of(model)
    if tables and (plan.inner_plan.num_processes > 1 or plan.micro > 1):
        what = f"the plan {plan.title!r} does not go with the tables {_names(tables)}"
        why = "a worker looks up the rows of a batch for one rank, at once"
        raise PlanError(Refusal(what, why, "use workers=N servers=M alone"))
    if tables and plan.sync != 1:
        what = f"sync={plan.sync} has workers take steps of their own on the whole model"
        raise PlanError(
            Refusal(f"{what}, and the rows of the tables {_names(tables)} are on servers", "", "leave sync= out")
        )
    if tables and given.get("evaluate_every"):
        what = f"evaluation needs the whole model in one process, and the tables {_names(tables)} are on servers"
        raise PlanError(Refusal(what, "", "set train.evaluate_every = 0"))
    if not variables:
        raise PlanError("the model has no parameter to train, so that there is nothing for servers to hold")
    job = Job(name=uuid.uuid4().hex[:12], plan=plan, variables=variables, shards=(), tables=tables, **given)
    may_cut(variables, job.optimizer)  # raises PlanError for an optimizer that workers cannot use
    shards = place_variables(variables, plan.servers, may_cut(variables, job.server_optimizer))
    if not all(shards):
        size = sum(v.num_bytes for v in variables)
        what = f"servers={plan.servers} do not all get a part of {len(variables)} variables of {size} bytes"
        raise PlanError(Refusal(what, "", "give fewer"))
    return dataclasses.replace(job, shards=shards)


def _on_meta(make_model: Callable[[], Sequence[nn.Module]]) -> nn.Module:
    """The model on the meta device; on the CPU if its constructor needs values."""
    try:
        with torch.device("meta"), tables_away():
            return make_model()[0]
    except Exception:  # the constructor needs values
        with tables_away():
            return make_model()[0]


def _names(tables: Sequence[TableSpec]) -> str:
    return ", ".join(table.name for table in tables)
