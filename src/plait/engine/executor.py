"""What the rest of the engine asks of a model that is spread: its values on this rank, and to run a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor, nn

from plait.spec.layout import Layout

if TYPE_CHECKING:  # a process that holds parameters and runs no step is ready in half the time without these
    from plait.backends.executable import StepResult
    from plait.compile.compiled import Compiled


class ModelParts(Protocol):
    """What one rank holds of a model, by the names of its parameters and buffers: what checkpoints save and restore."""

    @property
    def model(self) -> nn.Module:
        """The user's, whose parameters may be elsewhere."""
        ...

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """What the optimizer updates: this rank's part of each parameter, where it has one."""
        ...

    @property
    def layouts(self) -> dict[str, Layout]:
        """Of every parameter, as the optimizer holds it."""
        ...

    @property
    def dtypes(self) -> dict[str, Any]:
        """Of every parameter, as the model has it."""
        ...

    @property
    def buffers(self) -> dict[str, Tensor]:
        """Whole."""
        ...

    @property
    def changing(self) -> frozenset[str]:
        """The buffers that are parameters of the model, which do not train and which the step itself changes."""
        ...

    def local(self, name: str) -> Tensor | None:
        """This rank's part of a parameter, wherever it is kept; None where another rank has it."""
        ...

    def set_local(self, name: str, part: Tensor) -> None:
        """Give this rank's part of a parameter new values, which a step reads after `updated`."""
        ...

    def whole(self, name: str, local: Tensor | None) -> Tensor:
        """A tensor of a parameter's shape put together from the parts of all ranks, each of which calls it."""
        ...

    def updated(self) -> None:
        """Let steps read what the parts are now."""
        ...


class StepExecutor(ModelParts, Protocol):
    """One rank of a model that trains: of a captured step RankExecutor, of a model that runs as it is EagerExecutor."""

    @property
    def compiled(self) -> Compiled | None:
        """The compiled step of the first batch; None of a model that runs as it is."""
        ...

    @property
    def frozen(self) -> tuple[str, ...]:
        """Parameters that did not train in the last step."""
        ...

    @property
    def absent(self) -> Mapping[str, nn.Parameter]:
        """In the place of each parameter that other ranks have, one without memory of the same shape."""
        ...

    def run(
        self,
        batch: Any,
        key: int,
        train: bool = True,
        scale: Tensor | None = None,
        update: Callable[[dict[str, Tensor]], None] | None = None,
    ) -> StepResult:
        """Forward, and with `train` backward, of one batch. `key` is that of its random draws, `scale` multiplies the
        loss before backward; `update` takes the gradients of a schedule that updates within a step."""
        ...

    def release(self) -> None:
        """Let go of the model's own copy of parameters that live elsewhere."""
        ...

    def set_whole(self, name: str, whole: Tensor) -> None:
        """Give a parameter the values of a whole tensor, whose memory may become the parameter's."""
        ...

    def set_gradients(self, gradients: Mapping[str, Tensor]) -> None:
        """Give the parameters their gradients, and those that are not named none."""
        ...

    def whole_gradients(self) -> dict[str, Tensor]:
        """The gradients of the last `run` as whole tensors of their own; every rank calls it."""
        ...

    def scale_gradients(self, factor: float) -> None:
        """Multiply all gradients."""
        ...

    def gradient_norm(self) -> float:
        """The 2-norm of all gradients together, the same on every rank."""
        ...
