"""explain: what a plan would do to a model, without running anything."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from plait.run.agreeing.replicas import batch_of_replica
from plait.run.compiler import Captures, Compiler, LossFn
from plait.run.microbatch import microbatches
from plait.spec.annotation import Annotations
from plait.spec.kinds import Interval
from plait.spec.plan import Plan
from plait.view.explanation import Explanation, explanation


def explain(
    model: nn.Module, loss_fn: LossFn, batch: Any, plan: Plan | str, *, layouts: Annotations | None = None
) -> Explanation:
    """The layouts, their origins and the collectives of one step on a global batch; print it, or ask `.tensor(name)`.

    Of replicas that agree later it is the step of one of them.

    Raises PlanError, LayoutError or CaptureError as the Trainer would.
    """
    plan = Plan.parse(plan) if isinstance(plan, str) else plan
    part = microbatches(batch_of_replica(batch, plan), plan.micro)[0]
    found = explanation(Compiler(Captures(model, loss_fn), plan.within, layouts).lowered(part))
    return replace(found, agreement=_agreement(plan)) if plan.relaxed_axis else found


def _agreement(plan: Plan) -> str:
    """What replicas do beside the step that is shown."""
    num = plan.mesh.axis_size(plan.relaxed_axis)
    what = "gradients at every step" if plan.sync == 1 else f"weights (sync={Interval().show(plan.sync)})"
    how = f", through compress={plan.compress}" if plan.compress.kind != "none" else ""
    return f"plan {plan.title}: {num} replicas along {plan.relaxed_axis} agree on {what}{how}; this is one's step"
