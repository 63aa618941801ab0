"""Makes the Job of a run from a plan and the user's settings: finds the variables, and assigns them to servers."""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from plait.errors import PlanError, Refusal
from plait.integrations.ray_servers.optimizer_shard import may_cut
from plait.integrations.ray_servers.server_job import Job, check_plan, variables_of
from plait.integrations.ray_servers.tables.sparse_table import specs_of, tables_away
from plait.integrations.ray_servers.tables.table_shard import TableSpec
from plait.plan.plan import Plan
from plait.schedule.variable_placement import place_variables


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
