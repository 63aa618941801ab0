"""From a plan and what the user gives to a Job: what is served is found, and shared out among the servers."""

from __future__ import annotations

import uuid
from typing import Any

import torch
from torch import nn

from plait.decide.balance import balance
from plait.errors import PlaitError, PlanError
from plait.serve.held import may_cut
from plait.serve.job import Job, check_plan, variables_of
from plait.spec.plan import Plan


def make_job(plan: Plan, **given: Any) -> Job:
    """The job of a run; `given` are its fields but for name, variables and shards.

    PlanError or BatchError for a plan, a batch or an optimizer that does not go with parameter servers.
    """
    check_plan(plan, given["batch_size"])
    variables = variables_of(_on_meta(given["make_model"]))
    if not variables:
        raise PlanError("the model has no parameter to train, so that there is nothing for servers to hold")
    shards = balance(variables, plan.servers, may_cut(variables, given["optimizer"]))
    if not all(shards):
        raise PlanError(
            f"servers={plan.servers} do not all get a part of {len(variables)} variables of"
            f" {sum(v.num_bytes for v in variables)} bytes; give fewer"
        )
    return Job(name=uuid.uuid4().hex[:12], plan=plan, variables=variables, shards=shards, **given)


def _on_meta(make_model: Any) -> nn.Module:
    """The model without memory, where that can be made."""
    try:
        with torch.device("meta"):
            return make_model()[0]
    except PlaitError:
        raise
    except Exception:  # a constructor that needs values
        return make_model()[0]
