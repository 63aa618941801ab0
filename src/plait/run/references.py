"""The loss of one device: what every plan is compared with."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from plait.run.compiler import LossFn


def one_device_loss(model: nn.Module, loss_fn: LossFn, batch: Any, num_parts: int = 1) -> Tensor:
    """The loss on the whole batch by the model itself; with several parts, part after part, for local batch norm."""
    if num_parts == 1:
        total, weight = as_pair(loss_fn(model, batch))
        return total / weight
    buffers = {name: b.clone() for name, b in model.named_buffers()}
    parts = []
    kept: dict[str, Tensor] = {}
    for index in range(num_parts):
        for name, buffer in model.named_buffers():
            buffer.data.copy_(buffers[name])
        parts.append(as_pair(loss_fn(model, rows_of(batch, index, num_parts))))
        if index == 0:  # running statistics are rank 0's
            kept = {name: b.clone() for name, b in model.named_buffers()}
    for name, buffer in model.named_buffers():
        buffer.data.copy_(kept[name])
    total = torch.stack([s for s, _ in parts]).sum()
    return total / sum(torch.as_tensor(w) for _, w in parts)


def as_pair(loss: Any) -> tuple[Tensor, Any]:
    """(sum, weight); a mean counts as a sum of weight one."""
    return (loss[0], loss[1]) if isinstance(loss, (tuple, list)) else (loss.reshape(()), 1.0)


def rows_of(batch: Any, index: int, count: int) -> Any:
    """Part `index` of `count` of every tensor of the batch along its first dim."""

    def cut(leaf: Any) -> Any:
        return leaf.chunk(count)[index] if torch.is_tensor(leaf) and leaf.ndim else leaf

    return pytree.tree_map(cut, batch)
