"""The tensor-parallel GPT that a careful person writes by hand: Megatron's split, with plain all-reduces over Gloo.

Columns of query, key, value and up, rows of out and down; one all-reduce a block half in forward, one in backward.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from plait.api.job.gpt import Block, BytesGPT


class _Enter(torch.autograd.Function):
    """Into the split part: the same forward; sums gradients over ranks backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        gradient = gradient.contiguous()
        dist.all_reduce(gradient)
        return gradient


class _Leave(torch.autograd.Function):
    """Out of the split part: sums over ranks forward, in place; the same backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class SplitBlock(nn.Module):
    """One rank's part of a Block: its heads, and its columns of the MLP."""

    def __init__(self, whole: Block, rank: int, size: int) -> None:
        super().__init__()
        self.heads = whole.heads // size
        self.attention_norm, self.mlp_norm = whole.attention_norm, whole.mlp_norm
        self.query, self.key, self.value, self.up = (
            _columns(linear, rank, size) for linear in (whole.query, whole.key, whole.value, whole.up)
        )
        self.out, self.down = _rows(whole.out, rank, size), _rows(whole.down, rank, size)

    def forward(self, x: Tensor) -> Tensor:
        x = x + _Leave.apply(self._attention(_Enter.apply(self.attention_norm(x)))) + self.out.bias
        inside = F.gelu(self.up(_Enter.apply(self.mlp_norm(x))))
        return x + _Leave.apply(F.linear(inside, self.down.weight)) + self.down.bias

    def _attention(self, x: Tensor) -> Tensor:
        q, k, v = (
            part(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return F.linear(mixed.transpose(1, 2).flatten(2), self.out.weight)


def split_gpt(model: BytesGPT, rank: int, size: int) -> BytesGPT:
    """Changes `model` into one rank's part of it; embeddings, norms and the head stay whole."""
    model.blocks = nn.ModuleList(SplitBlock(block, rank, size) for block in model.blocks)
    return model


def _columns(whole: nn.Linear, rank: int, size: int) -> nn.Linear:
    return _linear(whole.weight.chunk(size)[rank], whole.bias.chunk(size)[rank])


def _rows(whole: nn.Linear, rank: int, size: int) -> nn.Linear:
    return _linear(whole.weight.chunk(size, dim=1)[rank], whole.bias)


def _linear(weight: Tensor, bias: Tensor) -> nn.Linear:
    part = nn.Linear(weight.shape[1], weight.shape[0], device="meta")
    part.weight = nn.Parameter(weight.detach().clone())
    part.bias = nn.Parameter(bias.detach().clone())
    return part
