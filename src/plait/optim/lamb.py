"""LAMB: Adam with each tensor's update scaled to the tensor's norm, for batches of many thousand rows.

You et al. 2020, "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes" (arXiv 1904.00962),
algorithm 2 with the identity for phi:

    m = b1 m + (1 - b1) g               v = b2 v + (1 - b2) g^2
    u = (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps) + weight_decay x
    x = x - lr (|x| / |u|) u            the norms are those of the whole tensor; their ratio is 1 where either is 0
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from plait.optim.sharded_parts import ShardedOptimizer

Parameters = Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]]


class Lamb(ShardedOptimizer, torch.optim.Optimizer):
    """LAMB (You et al. 2020, arXiv 1904.00962): Adam with a trust ratio for each tensor.

    Args:
        params: parameters or groups of them.
        lr: step length relative to each tensor's 2-norm; a number or a tensor of one element.
        betas: decay of the averages of gradient and squared gradient, each in [0, 1).
        eps: added to the root of the averaged squared gradient.
        weight_decay: decoupled, inside the norm; biases and norms customarily have a group with 0.

    It works with and without plait. If parameters are parts of tensors on several ranks, norms are those of the whole
    tensors. Averages are in the parameter's dtype, norms in at least float32. Raises ValueError for a bad argument.
    """

    def __init__(
        self,
        params: Parameters,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
    ) -> None:
        if torch.is_tensor(lr) and lr.numel() != 1:
            raise ValueError(f"lr has {lr.numel()} elements; give a number or a tensor of one element")
        if not float(lr) >= 0 or not eps >= 0 or not weight_decay >= 0:
            raise ValueError(f"lr={float(lr)}, eps={eps}, weight_decay={weight_decay}: none may be below 0")
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas={betas}: each is in [0, 1)")
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def _move(self) -> None:
        work = []
        squares: list[tuple[Tensor, Tensor]] = []
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if params:
                updates = self._updates(params, group)
                work.append((group, params, updates))
                for tensors in (params, updates):
                    squares += zip(params, _squares(tensors), strict=True)
        sums = self._parts.sums(squares)
        for group, params, updates in work:
            num = len(params)
            ratios = _ratios(torch.stack(sums[:num]), torch.stack(sums[num : 2 * num]))
            sums = sums[2 * num :]
            torch._foreach_mul_(updates, list((ratios * -group["lr"]).to(updates[0].dtype).unbind()))
            torch._foreach_add_(params, updates)

    def _updates(self, params: list[Tensor], group: dict[str, Any]) -> list[Tensor]:
        """u of each parameter, in new memory."""
        grads = [p.grad for p in params if p.grad is not None]
        for p, grad in zip(params, grads, strict=True):
            if grad.is_sparse or p.is_complex():
                kind = "sparse gradients" if grad.is_sparse else "complex parameters"
                raise RuntimeError(f"Lamb does not take {kind} (of shape {list(p.shape)})")
            if not self.state[p]:
                self.state[p] = {
                    "step": torch.tensor(0.0),
                    "exp_avg": torch.zeros_like(p, memory_format=torch.preserve_format),
                    "exp_avg_sq": torch.zeros_like(p, memory_format=torch.preserve_format),
                }
        steps, first, second = ([self.state[p][key] for p in params] for key in ("step", "exp_avg", "exp_avg_sq"))
        beta1, beta2 = group["betas"]
        torch._foreach_add_(steps, 1)
        torch._foreach_lerp_(first, grads, 1 - beta1)
        torch._foreach_mul_(second, beta2)
        torch._foreach_addcmul_(second, grads, grads, 1 - beta2)
        times = torch.stack(steps).double()
        denominators = torch._foreach_sqrt(second)
        torch._foreach_div_(denominators, list((1 - beta2**times).sqrt().unbind()))
        torch._foreach_add_(denominators, group["eps"])
        torch._foreach_mul_(denominators, list((1 - beta1**times).unbind()))
        updates = list(torch._foreach_div(first, denominators))
        if group["weight_decay"]:
            torch._foreach_add_(updates, params, alpha=group["weight_decay"])
        return updates


def _squares(tensors: list[Tensor]) -> list[Tensor]:
    """The squared 2-norm of each tensor."""
    wide = torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32
    return [norm.square() for norm in torch._foreach_norm(tensors, 2, dtype=wide)]


def _ratios(square_x: Tensor, square_u: Tensor) -> Tensor:
    """|x| / |u|, or 1 where either is 0."""
    usable = (square_x > 0) & (square_u > 0)
    return torch.where(usable, (square_x / square_u).sqrt(), 1.0)
