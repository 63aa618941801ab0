"""Dynamic loss scaling, so that gradients in fp16 do not underflow (Micikevicius et al. 2018).

The scale halves when a gradient overflows, and that step updates nothing; it doubles after 2000 good steps in a row:
the numbers of torch.amp.GradScaler.
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
    """The scale of one run, the same on every rank."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.value = FIRST_SCALE
        self.num_good = 0  # steps since the scale last changed

    def tensor(self) -> Tensor:
        """What the graph multiplies the loss by: a float32 scalar."""
        return torch.full((), self.value, device=self._world.device)

    def update(self, gradients: Iterable[Tensor]) -> bool:
        """Whether all gradients of all ranks are finite, so that the step may be made; sets the scale of the next one.

        Every rank calls it with its part of the gradients.
        """
        found = [g for g in gradients if g.numel()]  # of what does not divide evenly a rank may have nothing
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
        return {"scale": self.value, "num_good": self.num_good}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.value, self.num_good = float(state["scale"]), int(state["num_good"])
