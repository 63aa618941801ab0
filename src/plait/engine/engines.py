"""Which engine runs a plan."""

from __future__ import annotations

import importlib.util

from plait.engine.engine import Engine
from plait.errors import PlanError, Refusal
from plait.plan.plan import Plan


def engine_for(plan: Plan) -> type[Engine]:
    """The class of the engine that runs the plan. Raises PlanError where the packages that it needs are not there."""
    if plan.backend == "torch":
        return Engine
    check_installed(plan)
    try:
        from plait.engine.xla_engine import XlaEngine  # imports jax
    except ImportError as error:  # an older jax, or one without its jaxlib
        what = "backend=xla runs the step through jax 0.10 or later, and what is installed cannot be imported"
        refusal = Refusal(what, str(error), "pip install --upgrade 'plait[xla]', or leave backend=xla out")
        raise PlanError(refusal) from error

    return XlaEngine


def check_installed(plan: Plan) -> None:
    """Raise PlanError for a plan whose backend's package is not installed."""
    if plan.backend == "xla" and importlib.util.find_spec("jax") is None:
        what = "backend=xla runs the step through jax, which is not installed"
        raise PlanError(
            Refusal(what, "", "pip install 'plait[xla]' (on a TPU with jax[tpu]), or leave backend=xla out")
        )
