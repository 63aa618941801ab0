"""Calls of scaled_dot_product_attention with dropout, so that the mask is drawn by global position."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from plait.compile.ops.dropped_attention import dropped_attention

NUM_SEEDS = 1 << 62


@dataclass(frozen=True)
class _Attention:
    """The arguments of an attention over [B, H, S, D], [B, K, T, D] and [B, K, T, Dv]; the mask has four dims too."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    rate: float
    causal: bool
    scale: float


class DrawnDropout(TorchFunctionMode):
    """Runs attention with dropout as an op that draws the mask by global position (compile/ops/dropped_attention.py).

    An attention of other than three or four dims, or whose samples or heads are broadcast, runs as plain ops instead,
    whose dropout is an op of its own.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not torch.nn.functional.scaled_dot_product_attention or not _rate(*args, **kwargs) > 0:
            return func(*args, **kwargs)
        given = _attention(*args, **kwargs)
        if given is None:
            with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
                return func(*args, **kwargs)
        seed = torch.randint(NUM_SEEDS, (), device=given.query.device)  # a random number as any other in a step
        out, _ = dropped_attention(
            given.query, given.key, given.value, given.mask, seed, given.rate, given.causal, given.scale, []
        )
        return out if args[0].ndim == 4 else out.squeeze(1)


def _rate(
    query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False, **_: Any
) -> float:
    return dropout_p


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> _Attention | None:
    """These arguments, without autocast; None if they have another form, which PyTorch may refuse."""
    ndim = query.ndim
    if ndim not in (3, 4) or key.ndim != ndim or value.ndim != ndim or (is_causal and attn_mask is not None):
        return None
    device = query.device.type
    if torch.is_autocast_enabled(device) and query.dtype != torch.float64:
        half = torch.get_autocast_dtype(device)
        query, key, value = (t.to(half) for t in (query, key, value))
        attn_mask = attn_mask.to(half) if attn_mask is not None and attn_mask.is_floating_point() else attn_mask
    mask = attn_mask
    if mask is not None:
        mask = mask.view((1,) * (ndim - mask.ndim) + mask.shape) if mask.ndim < ndim else mask
    if ndim == 3:
        query, key, value = (t.unsqueeze(1) for t in (query, key, value))
        mask = None if mask is None else mask.unsqueeze(1)
    batch, heads, num, width = query.shape
    kv_heads, num_keys = key.shape[1:3]
    alike = key.shape == (batch, kv_heads, num_keys, width) and value.shape[:3] == key.shape[:3]
    grouped = heads == kv_heads or (enable_gqa and heads % kv_heads == 0)
    one_dtype = query.is_floating_point() and query.dtype == key.dtype == value.dtype
    if not (alike and grouped and one_dtype) or not _fits(mask, (batch, heads, num, num_keys), query.dtype):
        return None
    return _Attention(query, key, value, mask, dropout_p, is_causal, width**-0.5 if scale is None else scale)


def _fits(mask: Tensor | None, scores: tuple[int, ...], dtype: torch.dtype) -> bool:
    """Whether there is no mask, or one for scores of this shape, of 0s and 1s or to be added."""
    if mask is None:
        return True
    broadcast = mask.ndim == 4 and all(n in (1, m) for n, m in zip(mask.shape, scores, strict=True))
    return broadcast and mask.dtype in (torch.bool, torch.float32, dtype)
