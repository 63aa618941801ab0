"""Batch norm of every kind. Channels can always be sharded. In training the statistics are those of the whole batch: if
a batch or spatial dim is sharded, the op is rewritten as sums over it. In evaluation every dim can be sharded."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from plait.compile.ops.base import (
    REPLICATE,
    Call,
    OpSpec,
    Partial,
    Placement,
    Placements,
    Shard,
    Strategy,
    TensorSpec,
    by_number,
    no_groups,
    register,
    state,
)
from plait.compile.ops.dims import aten, overloads, widened
from plait.compile.ops.norm import mixed_statistics, statistics_dtype
from plait.spec.layout import Blocks


def _channel(spec: TensorSpec | None, x: TensorSpec, blocks: Blocks) -> Placement:
    """The placement, for sharded channels, of a tensor of x's shape, of one value per channel, or of an empty one."""
    if spec is None or spec.shape not in (x.shape, x.shape[1:2]):
        return REPLICATE
    return Shard(spec.ndim and min(spec.ndim - 1, 1), blocks)


def _strategies(is_training: Callable[[Call], bool]) -> Callable[[Call, Placements, int], Sequence[Strategy]]:
    def strategies(call: Call, given: Placements, size: int) -> list[Strategy]:
        x = call.inputs[0]
        blocks = {1} | {p.blocks for p in given if isinstance(p, Shard)}
        found = [
            Strategy(tuple(_channel(s, x, b) for s in call.inputs), tuple(_channel(s, x, b) for s in call.outputs))
            for b in sorted(blocks, key=by_number)
        ]
        for d in () if is_training(call) else (0, *range(2, x.ndim)):
            found += [
                Strategy(
                    tuple(Shard(d, b) if s.shape == x.shape else REPLICATE for s in call.inputs),
                    tuple(_sample(s, x, Shard(d, b), call) for s in call.outputs),
                )
                for b in sorted(blocks, key=by_number)
            ]
        return found

    return strategies


def _sample(spec: TensorSpec | None, x: TensorSpec, part: Shard, call: Call) -> Placement:
    """In evaluation: x's gradient is sharded like x, those of weight and bias are partial, statistics stay whole."""
    if spec is None or spec.shape == x.shape:
        return REPLICATE if spec is None else part
    backward = sum(s.shape == x.shape for s in call.inputs) > 1
    return Partial() if backward else REPLICATE


@dataclass(frozen=True)
class Normalized:
    """The results of a forward pass; the running statistics are the new ones."""

    out: Tensor
    mean: Tensor
    invstd: Tensor
    running_mean: Tensor | None
    running_var: Tensor | None


def _dims(x: Tensor) -> list[int]:
    return [0, *range(2, x.ndim)]


def _over_channels(statistic: Tensor, x: Tensor) -> Tensor:
    return statistic.view([1, -1, *[1] * (x.ndim - 2)])


def normalize(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> Normalized:
    """Batch norm as simpler ops. Returns the output, the saved statistics, and the new running statistics."""
    wide, dims = widened(x), _dims(x)
    kept = statistics_dtype(x, weight)
    new_mean, new_var = running_mean, running_var
    if training:
        mean = wide.mean(dims)
        centered = wide - _over_channels(mean, x)
        var = centered.square().mean(dims)
        invstd = (var + eps).rsqrt()
        count = math.prod(x.shape[d] for d in dims)
        if running_mean is not None:
            new_mean = (running_mean * (1 - momentum) + mean * momentum).to(running_mean.dtype)
        if running_var is not None:
            unbiased = var * (count / max(count - 1, 1))
            new_var = (running_var * (1 - momentum) + unbiased * momentum).to(running_var.dtype)
        saved = mean.to(kept), invstd.to(kept)
    else:
        assert running_mean is not None and running_var is not None
        centered = wide - _over_channels(running_mean, x)
        invstd = (running_var + eps).rsqrt()
        saved = x.new_empty(0, dtype=kept), x.new_empty(0, dtype=kept)
    out = centered * _over_channels(invstd, x)
    out = out if weight is None else out * _over_channels(weight, x)
    out = out if bias is None else out + _over_channels(bias, x)
    return Normalized(out.to(x.dtype), *saved, new_mean, new_var)


def normalize_backward(
    grad: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, invstd: Tensor, training: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of x, weight and bias."""
    wide, dims = widened(grad), _dims(x)
    count = math.prod(x.shape[d] for d in dims)
    normal = (widened(x) - _over_channels(mean, x)) * _over_channels(invstd, x)
    db = wide.sum(dims)
    dw = (wide * normal).sum(dims)
    dx = wide
    if training:
        dx = wide - _over_channels(db / count, x) - normal * _over_channels(dw / count, x)
    dx = dx * _over_channels(invstd if weight is None else invstd * weight, x)
    like = grad.dtype if weight is None else weight.dtype
    return dx.to(x.dtype), dw.to(like), db.to(like)


def _reserve(x: Tensor) -> Tensor:
    return x.new_empty(0, dtype=torch.uint8)


def _native(x: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    n = normalize(x, *rest)
    return n.out, n.mean, n.invstd


def _functional(x: Tensor, *rest: Any) -> tuple[Tensor | None, ...]:
    n = normalize(x, *rest)
    return n.out, n.mean, n.invstd, n.running_mean, n.running_var


def _no_stats(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, training: bool, momentum: float, eps: float
) -> tuple[Tensor, ...]:
    return _native(x, weight, bias, None, None, training, momentum, eps)


def _no_training(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, running_mean: Tensor, running_var: Tensor, momentum: float,
    eps: float,
) -> tuple[Tensor, ...]:  # fmt: skip
    return _native(x, weight, bias, running_mean, running_var, False, momentum, eps)


def _updating(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, running_mean: Tensor, running_var: Tensor, momentum: float,
    eps: float,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    n = normalize(x, weight, bias, running_mean, running_var, True, momentum, eps)
    return n.out, n.mean, n.invstd, _reserve(x), n.running_mean, n.running_var


def _native_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    save_mean: Tensor | None,
    save_invstd: Tensor | None,
    train: bool,
    eps: float,
    output_mask: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    if train:
        assert save_mean is not None and save_invstd is not None
        mean, invstd = save_mean, save_invstd
    else:
        assert running_mean is not None and running_var is not None
        mean, invstd = running_mean, (running_var + eps).rsqrt()
    found = normalize_backward(grad, x, weight, mean, invstd, train)
    return tuple(g if keep else None for g, keep in zip(found, output_mask, strict=True))


def _any_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor | None,
    rm: Tensor | None,
    rv: Tensor | None,
    save_mean: Tensor | None,
    save_var: Tensor | None,
    update: bool,
    eps: float,
    output_mask: Sequence[bool],
    reserve: Tensor,
) -> tuple[Tensor | None, ...]:
    return _native_backward(grad, x, weight, rm, rv, save_mean, save_var, update, eps, output_mask)


def _rule(
    decompose: Callable[..., tuple[Tensor | None, ...]],
    position: int | None = None,
    always: bool = True,
    linear: int = -1,
    formats: bool = False,
    fake: Callable[..., tuple[Tensor | None, ...]] | None = None,
) -> OpSpec:
    """`position` of the argument that says whether it is training, else `always`; `linear` in that input."""
    return OpSpec(
        strategies=_strategies(lambda call: always if position is None else bool(call.args[position])),
        decompose=decompose,
        linear=no_groups if linear < 0 else lambda call: [(linear,)],
        formats=formats,
        batch_statistics=always,
        fake=fake,
    )


register(*overloads("native_batch_norm", "_native_batch_norm_legit"), spec=_rule(_native, 5))
register(
    *overloads("_native_batch_norm_legit_functional"),
    spec=_rule(_functional, 5, fake=mixed_statistics(aten._native_batch_norm_legit_functional.default, slice(1, 3))),
)
register(
    *overloads("_native_batch_norm_legit.no_stats"),
    spec=_rule(_no_stats, 3, fake=mixed_statistics(aten._native_batch_norm_legit.no_stats, slice(1, 3))),
)
register(*overloads("_native_batch_norm_legit_no_training"), spec=_rule(_no_training, always=False))
register(*overloads("_batch_norm_with_update_functional"), spec=_rule(_updating))
register(*overloads("_batch_norm_no_update"), spec=OpSpec(strategies=_strategies(lambda call: False)))
# Of one row whose gradient lies otherwise the CPU's kernels read the wrong memory (torch 2.13).
register(*overloads("native_batch_norm_backward"), spec=_rule(_native_backward, 7, linear=0, formats=True))
state(*overloads("_batch_norm_with_update"), batch_statistics=True)
register(*overloads("batch_norm_backward"), spec=_rule(_any_backward, 7, linear=0, formats=True))
state(
    *overloads("native_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit.no_stats"),
    *overloads("_native_batch_norm_legit_functional", "_native_batch_norm_legit_no_training"),
    *overloads("_batch_norm_with_update", "_batch_norm_with_update_functional", "_batch_norm_no_update"),
    by_device=True,
)


# At capture: kernels that change running statistics, which their schemas do not say, and those whose backward wants
# what forward has kept in a form of its own, which no part of a batch has.


def _captured(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor | None, var: Any, training: bool,
    momentum: float, eps: float,
) -> tuple[Tensor, ...]:  # fmt: skip
    if not training:
        return aten._native_batch_norm_legit_no_training.default(x, weight, bias, mean, var, momentum, eps)  # type: ignore[no-any-return]
    if mean is None:
        return aten._native_batch_norm_legit.no_stats(x, weight, bias, True, momentum, eps)  # type: ignore[no-any-return]
    out, *saved, new_mean, new_var = aten._native_batch_norm_legit_functional.default(
        x, weight, bias, mean, var, True, momentum, eps
    )
    mean.copy_(new_mean)
    var.copy_(new_var)
    return out, *saved


def _captured_with_reserve(x: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return *_captured(x, *rest), _reserve(x)


def _captured_backward(
    x: Tensor, grad: Tensor, weight: Tensor | None, mean: Tensor | None, var: Tensor | None, save_mean: Tensor | None,
    save_invstd: Tensor | None, eps: float, *_: object,
) -> tuple[Tensor, ...]:  # fmt: skip
    saved = save_mean, save_invstd
    return aten.native_batch_norm_backward.default(grad, x, weight, mean, var, *saved, True, eps, [True] * 3)  # type: ignore[no-any-return]


state(*overloads("native_batch_norm", "miopen_batch_norm"), instead=_captured)
state(*overloads("cudnn_batch_norm"), instead=_captured_with_reserve)
state(*overloads("cudnn_batch_norm_backward", "miopen_batch_norm_backward"), instead=_captured_backward)
