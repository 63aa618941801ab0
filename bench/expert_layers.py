"""The expert-parallel layer that a careful person writes by hand: uneven all-to-alls of `torch.distributed` over Gloo.

Rows are sorted by expert, the numbers of rows are exchanged and read on the host, and only the rows that there are
travel (Lepikhin et al. 2020, "GShard"; as in torchtitan and in Megatron-Core's all-to-all dispatcher).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel


class _Exchange(torch.autograd.Function):
    """Rows to the ranks that have their experts; backward, their gradients back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sent: list[int], received: list[int]) -> Tensor:
        ctx.sent, ctx.received = sent, received
        return _exchange(x, sent, received)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _exchange(gradient.contiguous(), ctx.received, ctx.sent), None, None


def _exchange(x: Tensor, sent: list[int], received: list[int]) -> Tensor:
    out = x.new_empty(sum(received), *x.shape[1:])
    dist.all_to_all_single(out, x, received, sent)
    return out


class ExchangedExperts(nn.Module):
    """One rank's part of the gated MLPs of a mixture of experts of `transformers`."""

    def __init__(self, whole: nn.Module, rank: int, size: int) -> None:
        super().__init__()
        self.size, self.num_experts = size, whole.gate_up_proj.shape[0]
        self.gate_up_proj = nn.Parameter(whole.gate_up_proj.detach().chunk(size)[rank].clone())
        self.down_proj = nn.Parameter(whole.down_proj.detach().chunk(size)[rank].clone())
        for parameter in self.parameters():
            parameter.register_post_accumulate_grad_hook(self._mean)

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        flat, top = ids.flatten(), ids.shape[-1]
        order = flat.argsort(stable=True)
        counts = flat.new_zeros(self.num_experts).scatter_add_(0, flat, torch.ones_like(flat))
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts)
        sent = counts.view(self.size, -1).sum(1).tolist()
        arrived = theirs.view(self.size, -1)  # rows from each rank for each of this rank's experts
        received = arrived.sum(1).tolist()
        rows = _Exchange.apply(x[order // top], sent, received)

        experts = torch.arange(arrived.shape[1]).repeat(self.size)
        sorting = experts.repeat_interleave(theirs).argsort(stable=True)
        ends = arrived.sum(0).cumsum(0).int()
        gate, up = F.grouped_mm(rows[sorting], self.gate_up_proj.transpose(1, 2), offs=ends).chunk(2, -1)
        y = F.grouped_mm(F.silu(gate) * up, self.down_proj.transpose(1, 2), offs=ends)
        y = y[torch.empty_like(sorting).scatter_(0, sorting, torch.arange(len(sorting)))]

        y = _Exchange.apply(y, received, sent)
        y = y[torch.empty_like(order).scatter_(0, order, torch.arange(len(order)))]
        return (y.view(*ids.shape, -1) * weights.unsqueeze(-1)).sum(1)

    def _mean(self, parameter: Tensor) -> None:
        """The loss of a rank is the mean of its own tokens."""
        assert parameter.grad is not None
        parameter.grad.div_(self.size)


def exchange_experts(model: nn.Module, rank: int, size: int, is_experts: Callable[[nn.Module], bool]) -> nn.Module:
    """Change the model's experts into one rank's part of them, and wrap all else in DDP."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if is_experts(child):
                setattr(module, name, ExchangedExperts(child, rank, size))
    own = [
        f"{path}.{name}"
        for path, module in model.named_modules()
        if isinstance(module, ExchangedExperts)
        for name, _ in module.named_parameters()
    ]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, own)
    return DistributedDataParallel(model)
