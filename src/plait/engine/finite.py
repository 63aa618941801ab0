"""Checks for losses that are not finite, and clipping of gradients."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import Literal

from torch import Tensor

from plait.engine.executor import StepExecutor
from plait.errors import LossError


def check_finite(
    executor: StepExecutor,
    step: int,
    loss: Tensor,
    gradients: Mapping[str, Tensor],
    on_nan: Literal["raise", "warn"],
) -> None:
    """Raise LossError, or warn, if the loss is not finite. The message names a parameter or gradient that is not
    finite either."""
    if math.isfinite(float(loss)):
        return
    parts = ((name, executor.local(name)) for name in executor.parameters)
    bad = next((name for name, part in parts if part is not None and not bool(part.isfinite().all())), None)
    where = f"parameter {bad} is not finite" if bad else "all parameters are finite"
    if bad is None:
        bad = next((n for n, g in gradients.items() if not bool(g.isfinite().all())), None)
        where += f"; the first bad gradient is that of {bad}" if bad else ""
    message = f"the loss of step {step} is {float(loss)}: {where}{_late_checks(executor)}"
    if on_nan == "raise":
        raise LossError(f"{message}; lower the learning rate, set clip_norm, or pass on_nan='warn' to go on")
    warnings.warn(message, stacklevel=4)


def clip(executor: StepExecutor, limit: float) -> float:
    """Scale all gradients to a total 2-norm of at most `limit`. Returns the norm before."""
    norm = executor.gradient_norm()
    scale = limit / (norm + 1e-6)
    if scale < 1:
        executor.scale_gradients(scale)
    return norm


def _late_checks(executor: StepExecutor) -> str:
    """The assertions of model and loss that the step checks itself, for the message."""
    checks = () if executor.compiled is None else executor.compiled.program.captured.checks
    if not checks:
        return ""
    return f"; or what the model or the loss makes sure of does not hold: {'; '.join(dict.fromkeys(checks))}"
