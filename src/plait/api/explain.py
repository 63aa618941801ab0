"""explain: the layouts and collectives that a plan gives a model, without running anything."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from torch import nn

from plait.compile.capture.batch import take_rows
from plait.compile.capture.capture import LossFn
from plait.compile.rank_program import RankProgram
from plait.cost.memory_model import human_bytes
from plait.engine.arguments import check_arguments
from plait.engine.compiler import Captures, Compiler
from plait.engine.local_batch import num_rows
from plait.engine.local_sgd.replicas import bytes_sent
from plait.engine.setup_checks import check_model, check_plan, check_step
from plait.errors import BatchError
from plait.plan.annotation import Annotations
from plait.plan.key_values import Interval
from plait.plan.plan import Plan
from plait.report.explanation import Explanation, explanation


def explain(
    model: nn.Module, loss_fn: LossFn, batch: Any, plan: Plan | str, *, layouts: Annotations | None = None
) -> Explanation:
    """Explain one step of a plan on a global batch.

    Args:
        model: the model; its values are not read.
        loss_fn: as the Trainer takes it.
        batch: a global batch.
        plan: a Plan or its text.
        layouts: annotations of parameters by name pattern.

    Returns an Explanation with the layouts, their origins and the collectives. Print it, or ask `.tensor(name)` for one
    tensor, `.passes()` for the passes that made the graphs, and `.diff(name)` for what one pass changed. For replicas
    that synchronize later it shows the step of one replica, and with parameter servers that of one worker.

    Raises PlanError, LayoutError or CaptureError as the Trainer would.
    """
    check_model(model, loss_fn)
    check_arguments(layouts=layouts)
    plan = Plan.of(plan)
    check_plan(plan, model, None)
    own = _batch_of_worker(batch, plan) if plan.workers else batch
    compiled = check_step(Compiler(Captures(model, loss_fn), plan.inner_plan, layouts), own, plan)
    program = compiled.program
    about = _service(plan, program) if plan.workers else _exchange(plan, program) if plan.relaxed_axis else ""
    return replace(explanation(compiled), about=about, layouts=layouts)


def _batch_of_worker(batch: Any, plan: Plan) -> Any:
    """Rows of a global batch in the shapes of one worker's part. Raises BatchError for rows that workers cannot
    share."""
    rows, num = num_rows(batch), plan.workers - plan.backup
    if rows % num:
        raise BatchError(f"{num} workers do not divide the batch of {rows} rows; give a multiple of {num * plan.micro}")
    return take_rows(batch, rows, 0, rows // num)


def _service(plan: Plan, program: RankProgram) -> str:
    """A sentence about workers and servers, and the bytes that a worker sends and receives for an update."""
    trained = [(n, each.state) for n, each in program.sharding.parameters.items() if not each.frozen]
    held = sum(math.prod(layout.shape) * program.dtype_of(name).itemsize for name, layout in trained)
    servers = f"{plan.servers} server{'s' * (plan.servers != 1)}"
    what = "its gradient" if plan.sync == 1 else f"what {plan.sync} steps of its own have changed"
    how = f"through compress={plan.compress}" if plan.compress.kind != "none" else f"{human_bytes(held)}"
    return (
        f"plan {plan.title}: {plan.workers} workers, each on its part of the batch, and {servers} that hold the"
        f" parameters and update them; for each update a worker pulls {human_bytes(held)} of parameters and pushes"
        f" {what}, {how}. What follows is the step of one worker."
    )


def _exchange(plan: Plan, program: RankProgram) -> str:
    """A sentence about how replicas synchronize, and the bytes that a rank sends for it."""
    num = plan.mesh.axis_size(plan.relaxed_axis)
    sent = bytes_sent(plan, program.sharding, plan.inner_plan.mesh.coordinates(0))
    what = "gradients at every step" if plan.sync == 1 else f"weights (sync={Interval().show(plan.sync)})"
    how = f", through compress={plan.compress}" if plan.compress.kind != "none" else ""
    return (
        f"plan {plan.title}: {num} replicas along {plan.relaxed_axis} agree on {what}{how}; a rank sends"
        f" {human_bytes(int(sent))} for all of the model to agree once. What follows is the step of one replica."
    )
