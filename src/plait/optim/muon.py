"""torch.optim.Muon (Jordan et al. 2024; Liu et al. 2025, arXiv 2502.16982) for matrices that are sharded over ranks.

Momentum is elementwise, but the update of a matrix depends on all of it: each rank gathers the whole matrix, in the
bfloat16 that Muon computes in, and takes its part of the result.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.optim import _muon

from plait.optim.sharded_parts import ShardedOptimizer

_AT_ONCE = 32 << 20  # bytes of whole matrices that one all-reduce gathers


class Muon(ShardedOptimizer, torch.optim.Muon):
    """torch.optim.Muon, with the same result on parts of parameters as on one device."""

    def _move(self) -> None:
        for group in self.param_groups:
            for some in self._batches([p for p in group["params"] if p.grad is not None]):
                self._update(some, group)

    def _batches(self, params: list[Tensor]) -> Iterator[list[Tensor]]:
        """The parameters in order, in batches whose whole matrices take a bounded amount of memory."""
        batch: list[Tensor] = []
        size = 0
        for p in params:
            num = 2 * prod(self._parts.shape(p))
            if batch and size + num > _AT_ONCE:
                yield batch
                batch, size = [], 0
            batch.append(p)
            size += num
        if batch:
            yield batch

    def _update(self, params: list[Tensor], group: dict[str, Any]) -> None:
        parts, rate = self._parts, float(group["lr"])
        terms = []
        for p in params:
            gradient, state = p.grad, self.state[p]
            assert gradient is not None
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(gradient)
            momentum = state["momentum_buffer"].lerp_(gradient, 1 - group["momentum"])
            direction = gradient.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum
            terms.append((p, parts.place(p, direction.bfloat16())))
        for p, whole in zip(params, parts.sums(terms), strict=True):
            straight = _muon._zeropower_via_newtonschulz(
                whole.clone(), group["ns_coefficients"], group["ns_steps"], group["eps"]
            )
            step = _muon._adjust_lr(rate, group["adjust_lr_fn"], torch.Size(parts.shape(p)))
            p.mul_(1 - rate * group["weight_decay"])
            p.add_(parts.take(p, straight), alpha=-step)
