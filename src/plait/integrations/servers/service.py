"""What a run with parameter servers is, as every role of it gets it: how to build model, data and optimizer, and how
to go on."""

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
from plait.engine.optimizers import OptimizerFactory
from plait.errors import PlanError, UnevenBatchError
from plait.integrations.servers.coding import Coding
from plait.integrations.servers.tables.module import tables_of
from plait.integrations.servers.tables.table_shard import TableSpec
from plait.plan.annotation import Annotations
from plait.plan.legality import refusals
from plait.plan.plan import Plan
from plait.plan.step_facts import StepFacts
from plait.plan.step_refusals import of_rows
from plait.schedule.balance import Piece, Variable
from plait.schedule.consistency import Consistency

if TYPE_CHECKING:  # the graph's side of plait is for workers, and takes seconds to import
    from plait.engine.compiler import LossFn


class NoLog:
    """Takes the metrics of a run that keeps none."""

    def __init__(self, first_step: int) -> None:
        pass

    def write(self, values: dict[str, Any]) -> None:
        pass

    def close(self) -> None:
        pass


@dataclass(frozen=True)
class Job:
    """One run. The functions are called in the processes that need what they make, and must be importable there.

    make_model   () -> (model, loss_fn), the same values wherever it is called
    make_data    () -> (training data, data to evaluate on or None), map-style
    batch_size   rows of a step: one push of every worker, whatever the mode
    out          the folder of metrics and of the servers' own snapshots; `folder` is that of checkpoints
    make_log     first step -> what takes the metrics of each step (train.metrics.MetricsLog); by default nothing does
    order        the worker of each push in turn, for a run that is to be repeated
    """

    name: str  # drawn anew for each run: pushes of other runs are refused
    plan: Plan
    make_model: Callable[[], tuple[nn.Module, LossFn]]
    make_data: Callable[[], tuple[Any, Any]]
    optimizer: OptimizerFactory
    num_items: int  # of the training data
    batch_size: int
    steps: int
    out: str
    folder: str
    variables: tuple[Variable, ...]
    shards: tuple[tuple[Piece, ...], ...]
    tables: tuple[TableSpec, ...] = ()
    make_log: Callable[[int], Any] = NoLog
    scheduler: Callable[[torch.optim.Optimizer], Any] | None = None
    layouts: Annotations | None = None
    seed: int = 0
    clip_norm: float | None = None
    save_every: int = 0
    evaluate_every: int = 0
    evaluate_batches: int = 8
    keep: int = 2
    resume: bool = False
    begins_at: str = ""  # of a run that goes on: its checkpoint, or the folder of which that is the newest
    on_nan: str = "raise"
    scratch: str | None = None
    order: tuple[int, ...] = ()
    num_threads: int = 1

    @property
    def num_parts(self) -> int:
        """Into how many pieces of work a batch is cut: one for each push that a step is made of."""
        return self.plan.workers - self.plan.backup

    @property
    def coding(self) -> Coding:
        """How gradients travel."""
        return Coding(self.plan.compress, self.plan.exempt)

    @property
    def is_local(self) -> bool:
        """Whether workers take steps of their own, by the job's optimizer, and servers the mean of what they change."""
        return self.plan.sync != 1

    @property
    def steps_each(self) -> int:
        """Steps of a worker from one push to the next, of which the last may have fewer."""
        assert isinstance(self.plan.sync, int)
        return self.plan.sync

    @property
    def server_optimizer(self) -> OptimizerFactory:
        """By which servers update: with `is_local` the outer optimizer, for which a mean change is the gradient."""
        if not self.is_local:
            return self.optimizer
        lr, momentum = self.plan.outer_rates
        return functools.partial(torch.optim.SGD, lr=lr, momentum=momentum, nesterov=self.plan.outer == "nesterov")

    @property
    def server_scheduler(self) -> Callable[[torch.optim.Optimizer], Any] | None:
        return None if self.is_local else self.scheduler

    @property
    def server_names(self) -> list[str]:
        """By which the actors of the run find its servers."""
        return [f"plait-{self.name}-server-{index}" for index in range(len(self.shards))]

    @property
    def fingerprint(self) -> Fingerprint:
        return fingerprint_of(self.variables, self.tables, self.plan)


@dataclass(frozen=True)
class Fingerprint:
    """By which servers know the model of a worker: name, shape and type of every variable, and its own plan."""

    variables: tuple[tuple[str, tuple[int, ...], str], ...]
    plan: str

    @property
    def digest(self) -> str:
        return hashlib.sha256(json.dumps([self.variables, self.plan]).encode()).hexdigest()[:16]

    def difference(self, other: Fingerprint) -> str:
        """The first thing in which `other` is another one, in words; empty where it is the same."""
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
        return f"it has {extra[0]}, which the run has not" if extra else ""


def agreement_of(job: Job) -> Consistency:
    """How the job's workers agree, before any has joined."""
    plan = job.plan
    return Consistency(plan.workers, plan.staleness, plan.backup, order=job.order, overlap=plan.overlap)


def fingerprint_of(variables: Sequence[Variable], tables: Sequence[TableSpec], plan: Plan) -> Fingerprint:
    rows = tuple((table.name, (table.dim,), f"rows by {table.optimizer} of ") for table in tables)
    return Fingerprint((*((v.name, v.shape, v.dtype) for v in variables), *rows), str(plan.inner_plan))


def variables_of(model: nn.Module) -> tuple[Variable, ...]:
    """What is served whole: the parameters that are trained, but for tables."""
    tables = {f"{name}.weight" for name in tables_of(model)}
    return tuple(
        Variable(name, tuple(p.shape), torch_name(p.dtype), p.numel() * p.element_size())
        for name, p in model.named_parameters()
        if p.requires_grad and name not in tables
    )


def check_plan(plan: Plan, batch_size: int) -> None:
    """Refuse what does not go with parameter servers; PlanError or BatchError name what does."""
    from plait.compile.stages.split import (
        updates_within,  # of the graph's side, which only the user's process checks with
    )

    for refusal in refusals(plan, StepFacts(updates_within=updates_within(plan.inner_plan))):
        raise PlanError(refusal)
    for refusal in of_rows(plan, batch_size):
        raise UnevenBatchError(refusal)
