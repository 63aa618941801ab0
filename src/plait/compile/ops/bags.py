"""torch.nn.functional.embedding_bag by a lookup and a sum over the rows of each bag.

PyTorch's own op takes the rows of all bags in one dim, in which a batch cannot be cut; a lookup has a row for each bag.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def by_lookup(
    input: Tensor,
    weight: Tensor,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Any:
    """torch.nn.functional.embedding_bag. Returns NotImplemented for arguments that it refuses, for gradients that are
    sparse or scaled by frequency, and for the largest rows of bags that offsets delimit."""
    by_offsets = offsets is not None
    if sparse or scale_grad_by_freq or input.ndim != (1 if by_offsets else 2) or weight.ndim != 2:
        return NotImplemented
    if mode not in (("sum", "mean") if by_offsets else ("sum", "mean", "max")):
        return NotImplemented
    if per_sample_weights is not None and (mode != "sum" or per_sample_weights.shape != input.shape):
        return NotImplemented
    rows = F.embedding(input, weight, None, max_norm, norm_type)
    padding = None if padding_idx is None else (input == padding_idx % weight.shape[0]).unsqueeze(-1)
    if mode == "max":
        return _largest(rows, padding)
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.unsqueeze(-1)
    if padding is not None:
        rows = rows.masked_fill(padding, 0)
    if offsets is not None:
        offsets = offsets[:-1] if include_last_offset else offsets
        places = torch.arange(len(input), device=input.device, dtype=offsets.dtype)
        bags = torch.bucketize(places, offsets, right=True) - 1

    def total(values: Tensor) -> Tensor:
        if offsets is None:
            return values.sum(1)
        return values.new_zeros(len(offsets), values.shape[1]).index_add(0, bags, values)

    if mode == "sum":
        return total(rows)
    count = torch.ones_like(input) if padding is None else (~padding).squeeze(-1)
    return total(rows) / total(count.to(rows.dtype).unsqueeze(-1)).clamp(min=1)


def _largest(rows: Tensor, padding: Tensor | None) -> Tensor:
    """The largest rows; zeros where there are none."""
    if not rows.shape[1]:
        return rows.sum(1)
    if padding is None:
        return rows.max(1).values
    return rows.masked_fill(padding, -torch.inf).max(1).values.masked_fill(padding.all(1), 0)
