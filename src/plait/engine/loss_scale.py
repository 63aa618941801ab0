"""Dynamic loss scaling, which keeps fp16 gradients from underflowing (Micikevicius et al. 2018, "Mixed Precision
Training").

The scale halves when a gradient overflows, and that step's update is skipped. It doubles after 2000 good steps in a
row. These are the defaults of torch.amp.GradScaler. As there, the scale is on the device, and so is what decides on it:
the host does not wait for the gradients.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from plait.comm.protocol import World

FIRST_SCALE = 2.0**16
_GROWTH, _BACKOFF, _INTERVAL = 2.0, 0.5, 2000


class LossScale:
    """The loss scale of a run, equal on every rank."""

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
