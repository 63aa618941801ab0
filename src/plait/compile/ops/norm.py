"""Normalization over a sample's own dims: layer, RMS and group norm; and of weights. Forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from plait.compile.ops.base import (
    Args,
    Builder,
    Call,
    Emitted,
    Kwargs,
    OpSpec,
    Partial,
    Placements,
    Shard,
    Strategy,
    register,
    state,
)
from plait.compile.ops.dims import (
    HALF,
    aten,
    blocks_of,
    first_operand,
    overloads,
    positive,
    put,
    sharded_strategy,
    widened,
)


def statistics_dtype(x: Tensor, weight: Tensor | None) -> torch.dtype:
    """The dtype of means and inverse deviations: on a CPU that of x, unless the weights are wider."""
    like = x.device.type == "cpu" and (weight is None or weight.dtype == x.dtype)
    return x.dtype if like or x.dtype.itemsize != 2 else torch.float32


def mixed_statistics(op: OpOverload, weights: slice) -> Callable[..., Any]:
    """Shapes of a norm of a half-precision tensor with float32 weights, as under autocast. On a CPU its statistics are
    float32, which the op's own shape function does not know. `weights` are the positions of weight and bias."""

    def fake(*args: Any) -> tuple[Tensor | None, ...]:
        found = op(*args)
        mixed = any(isinstance(w, Tensor) and w.dtype != args[0].dtype for w in args[weights])
        return (found[0], *(t.float() if mixed and t.dtype in HALF else t for t in found[1:])) if mixed else found

    return fake


def _row_strategies(call: Call, given: Placements, size: int, normalized: Sequence[int]) -> list[Strategy]:
    """Strategies over rows, the dims before the normalized ones: tensors without them get partial gradients."""
    ndim = max(s.ndim for s in call.inputs)
    found = []
    for d in range(ndim - len(normalized)):
        inputs = [d if s.ndim == ndim else None for s in call.inputs]
        outputs = [None if s is None or s.ndim < ndim else d for s in call.outputs]
        found += [sharded_strategy(call, inputs, outputs, b, Partial()) for b in blocks_of(given, inputs)]
    return found


def _forward_rows(call: Call, given: Placements, size: int) -> list[Strategy]:
    return _row_strategies(call, given, size, call.args[1])


def _backward_rows(call: Call, given: Placements, size: int) -> list[Strategy]:
    return _row_strategies(call, given, size, call.args[2])


def _layer_norm(
    x: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    dims = list(range(x.ndim - len(normalized_shape), x.ndim))
    wide = widened(x)
    mean = wide.mean(dims, keepdim=True)
    centered = wide - mean
    rstd = (centered.square().mean(dims, keepdim=True) + eps).rsqrt()
    out = centered * rstd
    out = out if weight is None else out * weight
    out = out if bias is None else out + bias
    kept = statistics_dtype(x, weight)
    return out.to(x.dtype), mean.to(kept), rstd.to(kept)


def _layer_norm_backward(
    grad: Tensor,
    x: Tensor,
    normalized_shape: Sequence[int],
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    output_mask: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    first = x.ndim - len(normalized_shape)
    rows, dims = list(range(first)), list(range(first, x.ndim))
    wide, scale = widened(grad), widened(rstd)
    normal = (widened(x) - widened(mean)) * scale
    inner = wide if weight is None else wide * weight
    slope = (inner * normal).mean(dims, keepdim=True)
    dx = (inner - inner.mean(dims, keepdim=True) - normal * slope) * scale
    dw = (wide * normal).sum(rows) if rows else wide * normal
    db = wide.sum(rows) if rows else wide
    like = grad.dtype if weight is None else weight.dtype
    found = (dx.to(x.dtype), dw.to(like), db.to(like))
    return tuple(g if keep else None for g, keep in zip(found, output_mask, strict=True))


def _rms_norm(
    x: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, eps: float | None
) -> tuple[Tensor, Tensor]:
    dims = list(range(x.ndim - len(normalized_shape), x.ndim))
    wide = widened(x)
    rstd = (wide.square().mean(dims, keepdim=True) + (torch.finfo(wide.dtype).eps if eps is None else eps)).rsqrt()
    out = wide * rstd
    return (out if weight is None else out * weight).to(x.dtype), rstd


def _rms_norm_backward(
    grad: Tensor,
    x: Tensor,
    normalized_shape: Sequence[int],
    rstd: Tensor,
    weight: Tensor | None,
    output_mask: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    first = x.ndim - len(normalized_shape)
    rows, dims = list(range(first)), list(range(first, x.ndim))
    wide, normal = widened(grad), widened(x) * rstd
    inner = wide if weight is None else wide * weight
    dx = (inner - normal * (inner * normal).mean(dims, keepdim=True)) * rstd
    dw = (wide * normal).sum(rows) if rows else wide * normal
    like = grad.dtype if weight is None else weight.dtype
    found = (dx.to(x.dtype), dw.to(like))
    return tuple(g if keep else None for g, keep in zip(found, output_mask, strict=True))


register(
    *overloads("native_layer_norm"),
    spec=OpSpec(
        strategies=_forward_rows,
        decompose=_layer_norm,
        role="norm",
        fake=mixed_statistics(aten.native_layer_norm.default, slice(2, 4)),
    ),
)
register(
    *overloads("native_layer_norm_backward"),
    spec=OpSpec(strategies=_backward_rows, linear=first_operand, formats=True, decompose=_layer_norm_backward),
)
register(*overloads("_fused_rms_norm"), spec=OpSpec(strategies=_forward_rows, decompose=_rms_norm, role="norm"))
register(
    *overloads("_fused_rms_norm_backward"),
    spec=OpSpec(strategies=_backward_rows, linear=first_operand, formats=True, decompose=_rms_norm_backward),
)

# ---- weight norm: (v, g, dim) -> w, norms; g and the norms have one element in each other dim ----


def _weight_rows(call: Call, given: Placements, size: int) -> list[Strategy]:
    """Each index of `dim` has a norm of its own."""
    dim = positive(call.args[len(call.inputs)] if len(call.args) > len(call.inputs) else 0, call.inputs[0].ndim)
    inputs, outputs = (dim,) * len(call.inputs), (dim,) * len(call.outputs)
    return [sharded_strategy(call, inputs, outputs, b) for b in blocks_of(given, inputs)]


register(*overloads("_weight_norm_interface"), spec=OpSpec(strategies=_weight_rows, formats=True))
register(
    *overloads("_weight_norm_interface_backward"),
    spec=OpSpec(strategies=_weight_rows, linear=first_operand, formats=True),
)

# ---- group norm: (x, weight, bias, N, C, HxW, group, eps) -> out, mean, rstd, the last two of [N, group] ----


def _group_strategies(call: Call, given: Placements, size: int) -> list[Strategy]:
    """Strategies over samples, and over channels in whole groups. Per-channel tensors have one dim."""
    found = []
    for d in (0, 1):
        inputs = [d if s.ndim > 1 else (0 if d else None) for s in call.inputs]
        outputs = [None if s is None else d if s.ndim > 1 else (0 if d else None) for s in call.outputs]
        found += [sharded_strategy(call, inputs, outputs, b, Partial()) for b in blocks_of(given, inputs)]
    return found


def _emit_group(builder: Builder, call: Call, strategy: Strategy, args: Args, kwargs: Kwargs) -> Emitted:
    first = 5 if call.op in _GROUP_BACKWARD else 3  # position of N
    part = strategy.inputs[0]
    if isinstance(part, Shard):
        for position in (first,) if part.dim == 0 else (first + 1, first + 3):
            args = put(args, position, args[position] // builder.size)
    return builder.call(call.op, *args, **kwargs)


def _group_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, N: int, C: int, HxW: int, group: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    wide = widened(x).reshape(N, group, C // group, HxW)
    mean = wide.mean((2, 3), keepdim=True)
    centered = wide - mean
    rstd = (centered.square().mean((2, 3), keepdim=True) + eps).rsqrt()
    out = (centered * rstd).reshape(N, C, HxW)
    out = out if weight is None else out * weight.view(1, C, 1)
    out = out if bias is None else out + bias.view(1, C, 1)
    kept = statistics_dtype(x, weight)
    return out.reshape(x.shape).to(x.dtype), mean.view(N, group).to(kept), rstd.view(N, group).to(kept)


def _group_norm_backward(
    grad: Tensor,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    N: int,
    C: int,
    HxW: int,
    group: int,
    output_mask: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    split = (N, group, C // group, HxW)
    scale = widened(rstd).view(N, group, 1, 1)
    normal = (widened(x).reshape(split) - widened(mean).view(N, group, 1, 1)) * scale
    flat = widened(grad).reshape(N, C, HxW)
    inner = (flat if weight is None else flat * weight.view(1, C, 1)).reshape(split)
    slope = (inner * normal).mean((2, 3), keepdim=True)
    dx = ((inner - inner.mean((2, 3), keepdim=True) - normal * slope) * scale).reshape(x.shape)
    dw = (flat * normal.reshape(N, C, HxW)).sum((0, 2))
    like = grad.dtype if weight is None else weight.dtype
    found = (dx.to(x.dtype), dw.to(like), flat.sum((0, 2)).to(like))
    return tuple(g if keep else None for g, keep in zip(found, output_mask, strict=True))


_GROUP_BACKWARD = frozenset(overloads("native_group_norm_backward"))
register(
    *overloads("native_group_norm"),
    spec=OpSpec(
        strategies=_group_strategies,
        emit=_emit_group,
        formats=True,
        decompose=_group_norm,
        fake=mixed_statistics(aten.native_group_norm.default, slice(1, 3)),
    ),
)


def _fake_group_backward(grad: Tensor, x: Tensor, *args: Any) -> tuple[Tensor | None, ...]:
    """Shapes of the backward; the op's own shape function gives the input's gradient the dtype of the statistics."""
    found = aten.native_group_norm_backward.default(grad, x, *args)
    return (None if found[0] is None else found[0].to(x.dtype), *found[1:])


register(
    *_GROUP_BACKWARD,
    spec=OpSpec(
        strategies=_group_strategies,
        emit=_emit_group,
        linear=first_operand,
        formats=True,
        decompose=_group_norm_backward,
        fake=_fake_group_backward,
    ),
)
state(*overloads("native_layer_norm", "native_group_norm"), by_device=True)  # by the dtype of mean and rstd
