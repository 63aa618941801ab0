"""Dynamic loss scaling, which keeps fp16 gradients from underflowing (Micikevicius et al. 2018, "Mixed Precision
Training").

The scale halves when a gradient overflows, and that step's update is skipped. It doubles after 2000 good steps in a
row. These are the defaults of torch.amp.GradScaler.
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
        self.value = FIRST_SCALE
        self.num_good = 0  # steps since the scale last changed

    def tensor(self) -> Tensor:
        """The scale as a 0-d float32 tensor, by which the graph multiplies the loss."""
        return torch.full((), self.value, device=self._world.device)

    def update(self, gradients: Iterable[Tensor]) -> bool:
        """Set the next step's scale. Returns whether all gradients of all ranks are finite, so that the update may
        be made.

        `gradients` are this rank's parts. All ranks must call it.
        """
        found = [g for g in gradients if g.numel()]  # a rank may have no part of an uneven tensor
        norms = torch._foreach_norm(found, float("inf")) if found else []
        bad = torch.stack([(~norm.isfinite()).to(torch.int32).to(self._world.device) for norm in norms] or
                          [torch.zeros((), dtype=torch.int32, device=self._world.device)]).amax()  # fmt: skip
        good = not bool(self._world.everyone().all_reduce(bad.reshape(1), "max").wait())
        self.num_good = self.num_good + 1 if good else 0
        if not good:
            self.value *= _BACKOFF
        elif self.num_good == _INTERVAL:
            self.value *= _GROWTH
            self.num_good = 0
        return good

    def state_dict(self) -> dict[str, Any]:
        """The scale and the count of good steps, for a checkpoint."""
        return {"scale": self.value, "num_good": self.num_good}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state_dict`."""
        self.value, self.num_good = float(state["scale"]), int(state["num_good"])
