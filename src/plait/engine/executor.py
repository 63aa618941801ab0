"""The interface of a distributed model to the rest of the engine: its values on this rank, and running a step."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
from torch import Tensor, nn

from plait.comm.device import is_host
from plait.errors import LossError
from plait.plan.sharding_plan import ShardingPlan
from plait.spec.layout import Layout

if TYPE_CHECKING:  # a parameter server, which runs no step, starts in half the time without these imports
    from plait.backends.backend import StepResult
    from plait.compile.compiled import Compiled


class ModelParts(Protocol):
    """The parameters and buffers of a model on one rank, by name: what checkpoints save and restore."""

    @property
    def model(self) -> nn.Module:
        """The user's model. Its parameters may be placeholders."""
        ...

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The tensors that the optimizer updates, by name: this rank's part of each parameter that it has a part of."""
        ...

    @property
    def layouts(self) -> dict[str, Layout]:
        """The layout of every parameter, as the optimizer holds it."""
        ...

    @property
    def dtypes(self) -> dict[str, torch.dtype]:
        """The torch.dtype of every parameter in the model."""
        ...

    @property
    def buffers(self) -> dict[str, Tensor]:
        """The buffers by name, whole."""
        ...

    @property
    def changing(self) -> frozenset[str]:
        """The names of `buffers` that are parameters of the model: untrained, and changed by the step itself."""
        ...

    def local(self, name: str) -> Tensor | None:
        """This rank's part of a parameter, wherever it is stored; None if this rank has none."""
        ...

    def set_local(self, name: str, part: Tensor) -> None:
        """Set the values of this rank's part of a parameter. Steps read them after `updated`."""
        ...

    def whole(self, name: str, local: Tensor | None) -> Tensor:
        """The whole tensor, of the parameter's shape, from the parts of all ranks. All ranks must call it."""
        ...

    def updated(self) -> None:
        """Make steps read the current values of the parts."""
        ...


class StepExecutor(ModelParts, Protocol):
    """The parts of a model that trains: RankExecutor for a captured step, EagerExecutor for a model that is not
    captured."""

    @property
    def compiled(self) -> Compiled | None:
        """The compiled step of the first batch; None for a model that is not captured."""
        ...

    @property
    def sharding(self) -> ShardingPlan:
        """How the ranks hold each parameter."""
        ...

    @property
    def frozen(self) -> tuple[str, ...]:
        """The names of parameters that did not train in the last step."""
        ...

    @property
    def absent(self) -> Mapping[str, nn.Parameter]:
        """For each parameter that only other ranks have, a meta tensor of its local shape there."""
        ...

    def run(
        self,
        batch: Any,
        key: int,
        train: bool = True,
        scale: Tensor | None = None,
        update: Callable[[dict[str, Tensor]], None] | None = None,
    ) -> StepResult:
        """Run forward, and with `train` backward, of one batch.

        key     the key of the random draws
        scale   factor of the loss before backward, a 0-d tensor
        update  takes the gradients of a schedule that updates within a step
        """
        ...

    def release(self) -> None:
        """Free the model's own copy of parameters that are stored elsewhere."""
        ...

    def set_whole(self, name: str, whole: Tensor) -> None:
        """Set a parameter from a whole tensor, whose memory may become the parameter's."""
        ...

    def set_gradients(self, gradients: Mapping[str, Tensor]) -> None:
        """Set the gradients of the parameters; those that are not named get None."""
        ...

    def whole_gradients(self) -> dict[str, Tensor]:
        """The gradients of the last `run`, by name, as whole tensors in new memory. All ranks must call it."""
        ...

    def scale_gradients(self, factor: Tensor) -> None:
        """Multiply all gradients by the factor."""
        ...

    def gradient_norm(self) -> Tensor:
        """The 2-norm of all gradients together, equal on every rank."""
        ...


def check_finite(
    executor: StepExecutor,
    step: int,
    loss: float,
    gradients: Mapping[str, Tensor],
    on_nan: Literal["raise", "warn"],
) -> None:
    """Raise LossError, or warn, if the loss is not finite. The message names a parameter or gradient that is not
    finite either."""
    if math.isfinite(loss):
        return
    parts = ((name, executor.local(name)) for name in executor.parameters)
    bad = next((name for name, part in parts if part is not None and not bool(part.isfinite().all())), None)
    where = f"parameter {bad} is not finite" if bad else "all parameters are finite"
    if bad is None:
        bad = next((n for n, g in gradients.items() if not bool(g.isfinite().all())), None)
        where += f"; the first bad gradient is that of {bad}" if bad else ""
    message = f"the loss of step {step} is {loss}: {where}{_late_checks(executor)}"
    if on_nan == "raise":
        raise LossError(f"{message}; lower the learning rate, set clip_norm, or pass on_nan='warn' to go on")
    warnings.warn(message, stacklevel=4)


def clip(executor: StepExecutor, limit: float) -> Tensor:
    """Scale all gradients to a total 2-norm of at most `limit`. Returns the norm before, a 0-d tensor."""
    norm = executor.gradient_norm()
    scale = limit / (norm + 1e-6)
    if not is_host(norm.device):
        executor.scale_gradients(scale.clamp(max=1.0))  # the host does not wait for the norm
    elif scale < 1:
        executor.scale_gradients(scale)
    return norm


def scale_all(gradients: list[Tensor], factor: Tensor) -> None:
    """Multiply tensors by a 0-d tensor, in place. The host waits for a factor on the device only if tensors are on the
    host."""
    by_place: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for gradient in gradients:
        by_place.setdefault((gradient.device, gradient.dtype), []).append(gradient)
    for (device, dtype), some in by_place.items():
        torch._foreach_mul_(some, float(factor) if is_host(device) else factor.to(device, dtype, non_blocking=True))


def _late_checks(executor: StepExecutor) -> str:
    """The assertions of model and loss that the step checks itself, for the message."""
    checks = () if executor.compiled is None else executor.compiled.program.captured.checks
    if not checks:
        return ""
    return f"; or what the model or the loss makes sure of does not hold: {'; '.join(dict.fromkeys(checks))}"
