"""The state of a training run on one rank: what a checkpoint saves and restores.

Two parts of it are defined here: the loss scale, which keeps fp16 gradients from underflowing (Micikevicius et al.
2018, "Mixed Precision Training"), and an exponential moving average of the weights, sharded as the weights are (Polyak
and Juditsky 1992).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from plait.comm.protocol import World
from plait.engine.executor import ModelParts
from plait.engine.local_sgd.replicas import Replicas
from plait.errors import PlanError
from plait.plan.plan import Plan


class _Holder(Protocol):
    @property
    def parameters(self) -> Mapping[str, object]: ...
    def local(self, name: str) -> Tensor | None: ...
    def set_local(self, name: str, part: Tensor) -> None: ...
    def updated(self) -> None: ...


class MovingAverage:
    """After each step, average = decay * average + (1 - decay) * weights. It begins with the current weights.

    The average of half-precision weights is float32. Buffers, such as running statistics, are not averaged. Raises
    PlanError for a decay outside [0, 1).
    """

    def __init__(self, decay: float) -> None:
        if not 0 <= decay < 1:
            raise PlanError(f"decay={decay}: the decay of a moving average is at least 0 and below 1, such as 0.999")
        self.decay = decay
        self.tensors: dict[str, Tensor] = {}  # by parameter name: this rank's part of the average
        self._holder: _Holder | None = None

    def begin(self, holder: _Holder) -> None:
        """Start the average with the current weights of `holder`."""
        self._holder = holder
        for name in holder.parameters:
            part = holder.local(name)
            assert part is not None
            self.tensors[name] = part.to(self.dtype_of(part.dtype), copy=True)

    @staticmethod
    def dtype_of(dtype: torch.dtype) -> torch.dtype:
        """The dtype of the average of a parameter of this dtype."""
        return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype

    @torch.no_grad()
    def update(self, skipped: Tensor | None = None) -> None:
        """Update the average after a step. `skipped` is 1 if the step made no update, else 0, as a 0-d tensor."""
        assert self._holder is not None
        share = 1 - self.decay
        for name, average in self.tensors.items():
            part = self._holder.local(name)
            assert part is not None
            average.lerp_(part.to(average), share if skipped is None else ((1 - skipped) * share).to(average.dtype))

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Context in which the trainer's weights are the average, to evaluate, export or gather them. Do not step
        inside."""
        if self._holder is None:
            raise PlanError("there is no average yet: call trainer.prepare(batch) or trainer.step(batch) first")
        parts = self._holder
        own = {name: part.clone() for name in self.tensors if (part := parts.local(name)) is not None}
        self._put(self.tensors)
        try:
            yield
        finally:
            self._put(own)

    def _put(self, values: dict[str, Tensor]) -> None:
        assert self._holder is not None
        for name, value in values.items():
            self._holder.set_local(name, value)
        self._holder.updated()


FIRST_SCALE = 2.0**16
_GROWTH, _BACKOFF, _INTERVAL = 2.0, 0.5, 2000


class LossScale:
    """The loss scale of a run, equal on every rank.

    It halves when a gradient overflows, and that step's update is skipped. It doubles after 2000 good steps in a row.
    These are the defaults of torch.amp.GradScaler. As there, the scale is on the device, and so is what decides on it:
    the host does not wait for the gradients.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._scale = torch.full((), FIRST_SCALE, device=world.device)
        self._num_good = torch.zeros((), dtype=torch.int32, device=world.device)

    @property
    def value(self) -> float:
        """The scale. The host waits for it."""
        return float(self._scale)

    @value.setter
    def value(self, value: float) -> None:
        self._scale.fill_(value)

    @property
    def num_good(self) -> int:
        """Steps since the scale last changed. The host waits for it."""
        return int(self._num_good)

    @num_good.setter
    def num_good(self, num: int) -> None:
        self._num_good.fill_(num)

    def tensor(self) -> Tensor:
        """The scale as a 0-d float32 tensor, by which the graph multiplies the loss."""
        return self._scale.clone()

    def update(self, gradients: Iterable[Tensor]) -> Tensor:
        """Set the next step's scale. Returns 1 if any gradient of any rank is not finite, so that there may be no
        update, else 0, as a 0-d float32 tensor on the device.

        `gradients` are this rank's parts. All ranks must call it.
        """
        device = self._world.device
        found = [g for g in gradients if g.numel()]  # a rank may have no part of an uneven tensor
        norms = torch._foreach_norm(found, float("inf")) if found else []
        bad = [(~norm.isfinite()).float().to(device, non_blocking=True) for norm in norms]
        mine = torch.stack(bad).amax() if bad else torch.zeros((), device=device)
        overflow = self._world.everyone().all_reduce(mine.reshape(1), "max").wait()[0]
        torch._amp_update_scale_(self._scale, self._num_good, overflow, _GROWTH, _BACKOFF, _INTERVAL)
        return overflow

    def state_dict(self) -> dict[str, Any]:
        """The scale and the count of good steps, for a checkpoint."""
        return {"scale": self.value, "num_good": self.num_good}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state_dict`."""
        self.value, self.num_good = float(state["scale"]), int(state["num_good"])


NO_BATCH_YET = "the trainer has not seen a batch yet; call prepare(batch) or step(batch) first"


@dataclass
class TrainState:
    """The objects that hold the state of a run. Training changes them; they are not copies.

    executor    the model's parameters and buffers on this rank; None before the first batch
    update      the optimizer's step (engine/optimizer_step.py), which also reads optimizer state that is offloaded
    loss_scale  the loss scale of fp16
    replicas    the replicas of a plan whose ranks synchronise less often than every step, or through a compressor
    average     a moving average of the weights
    """

    plan: Plan
    world: World
    seed: int
    step_number: int = 0
    executor: ModelParts | None = None
    optimizer: torch.optim.Optimizer | None = None
    scheduler: Any = None
    update: Any = None
    loss_scale: LossScale | None = None
    replicas: Replicas | None = None
    average: MovingAverage | None = None

    @property
    def held(self) -> ModelParts:
        """The parameters and buffers of this rank. Raises PlanError before the first batch."""
        if self.executor is None:
            raise PlanError(NO_BATCH_YET)
        return self.executor
