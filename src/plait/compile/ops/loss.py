"""Losses. As in ATen, reduction 0 is none, 1 mean and 2 sum.

Connectionist temporal classification (Graves et al. 2006) reads lengths from tensors. PyTorch's ctc_loss turns them
into Python numbers, which a graph does not have; the ops of this file keep them as tensors, and their results have the
shapes for the longest possible target.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.nn import _reduction

import plait.compile.ops.loss  # noqa: F401  (defines ops)
from plait.compile.ops.base import (
    REPLICATE,
    Args,
    Builder,
    Call,
    Emit,
    Emitted,
    Factor,
    Kwargs,
    OpSpec,
    Partial,
    Placement,
    Placements,
    Shard,
    Strategy,
    einsum,
    register,
)
from plait.compile.ops.dims import (
    aten,
    broadcast_dim,
    broadcast_shape,
    equal_blocks_of,
    first_operand,
    overloads,
    pointwise_factors,
    sharded_strategy,
    widened,
)
from plait.compile.ops.index import local_index, masked
from plait.errors import CaptureError


@torch.library.custom_op("plait::ctc_loss", mutates_args=())
def ctc_loss(
    log_probs: Tensor, targets: Tensor, input_lengths: Tensor, target_lengths: Tensor, blank: int, zero_infinity: bool
) -> tuple[Tensor, Tensor]:
    """The negative log-likelihood of each sample, [N], and log-alpha, [N, T, 2S + 1].

    log_probs [T, N, C], targets [N, S], both lengths [N].
    """
    loss, alpha = aten._ctc_loss.Tensor(log_probs, targets, input_lengths, target_lengths, blank, zero_infinity)
    wide = alpha.new_zeros(alpha.shape[0], alpha.shape[1], 2 * targets.shape[1] + 1)
    wide[:, :, : alpha.shape[2]] = alpha
    return loss, wide


@ctc_loss.register_fake
def _(log_probs: Tensor, targets: Tensor, *rest: object) -> tuple[Tensor, Tensor]:
    num_steps, num_samples, _ = log_probs.shape
    return (
        log_probs.new_empty(num_samples),
        log_probs.new_empty(num_samples, num_steps, 2 * targets.shape[1] + 1),
    )


@torch.library.custom_op("plait::ctc_loss_backward", mutates_args=())
def ctc_loss_backward(
    grad: Tensor,
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    loss: Tensor,
    alpha: Tensor,
    blank: int,
    zero_infinity: bool,
) -> Tensor:
    """The gradient of the log-probabilities, [T, N, C], from the `loss` and `alpha` of ctc_loss."""
    width = 2 * int(target_lengths.max()) + 1 if target_lengths.numel() else 1
    return aten._ctc_loss_backward.Tensor(  # type: ignore[no-any-return]
        grad, log_probs, targets, input_lengths, target_lengths, loss, alpha[:, :, :width].contiguous(), blank,
        zero_infinity,
    )  # fmt: skip


@ctc_loss_backward.register_fake
def _(grad: Tensor, log_probs: Tensor, *rest: object) -> Tensor:
    return torch.empty_like(log_probs)


def _keep(ctx: Any, inputs: Args, output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.blank, ctx.zero_infinity = inputs
    ctx.save_for_backward(*tensors, *output)


def _backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    saved = [t.contiguous() if t.is_floating_point() else t for t in ctx.saved_tensors]
    found = ctc_loss_backward(grad.contiguous(), *saved, ctx.blank, ctx.zero_infinity)
    return found, None, None, None, None, None


ctc_loss.register_autograd(_backward, setup_context=_keep)


def with_lengths(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor | Sequence[int],
    target_lengths: Tensor | Sequence[int],
    blank: int = 0,
    reduction: str | int = "mean",
    zero_infinity: bool = False,
) -> Any:
    """torch.nn.functional.ctc_loss for padded targets [N, S]. Returns NotImplemented if lengths are numbers and targets
    are concatenated without padding; raises CaptureError if targets are so and lengths are tensors."""
    if targets.ndim != 2 or log_probs.ndim != 3:
        if isinstance(target_lengths, Tensor) and targets.ndim == 1 and log_probs.ndim == 3:
            raise CaptureError(
                "ctc_loss of targets without padding has shapes that depend on the numbers in target_lengths; pad the"
                " targets to one length, [N, S]"
            )
        return NotImplemented
    lengths = [torch.as_tensor(n, device=targets.device).long() for n in (input_lengths, target_lengths)]
    if torch.is_autocast_enabled(log_probs.device.type):  # which runs it in float32
        log_probs = log_probs.float()
    loss, _ = ctc_loss(log_probs.contiguous(), targets, *lengths, blank, zero_infinity)
    if zero_infinity:
        loss = torch.where(loss == float("inf"), torch.zeros_like(loss), loss)
    if reduction in ("mean", _reduction.get_enum("mean")):
        return (loss / lengths[1].clamp(min=1).to(loss.dtype)).mean()
    return loss.sum() if reduction in ("sum", _reduction.get_enum("sum")) else loss


MEAN = 1

# ---- pointwise losses: mse, huber, smooth l1, binary cross-entropy ----


def _loss_factors(at: int) -> Callable[[Call], Sequence[Factor]]:
    """Factors of a loss; `at` is the position of the reduction among the arguments."""

    def factors(call: Call) -> Sequence[Factor]:
        if call.arg(at, "reduction", MEAN) == 0:
            return pointwise_factors(call)
        shape = broadcast_shape([s.shape for s in call.inputs])
        return [
            Factor(tuple([broadcast_dim(s.shape, d, shape) for s in call.inputs]), (None,))
            for d, n in enumerate(shape)
            if n > 1
        ]

    return factors


def _emit_mean(at: int) -> Emit:
    """Each rank's part is a mean over its own elements, of which there are `size` times fewer."""

    def emit(builder: Builder, call: Call, strategy: Strategy, args: Args, kwargs: Kwargs) -> Emitted:
        out = builder.call(call.op, *args, **kwargs)
        cut = any(isinstance(p, Shard) for p in (*strategy.inputs, *strategy.outputs))
        if call.arg(at, "reduction", MEAN) != MEAN or not cut:
            return out
        if len(call.outputs) == 1:
            return builder.call(aten.div.Scalar, out, builder.size)
        loss, *rest = (builder.call(operator.getitem, out, i) for i in range(len(call.outputs)))
        return (builder.call(aten.div.Scalar, loss, builder.size), *rest)

    return emit


def _loss_backward_factors(call: Call) -> list[Factor]:
    """(grad, self, target, ...): the gradient of a mean or sum is a scalar."""
    out = call.outputs[0]
    assert out is not None
    dims = range(out.ndim) if all(s.shape in ((), out.shape) for s in call.inputs) else ()
    return [Factor(tuple(None if s.ndim == 0 else d for s in call.inputs), (d,)) for d in dims]


for _name, _at in {
    "mse_loss": 2, "smooth_l1_loss": 2, "huber_loss": 2, "soft_margin_loss": 2, "binary_cross_entropy": 3,
    "binary_cross_entropy_with_logits": 4,
}.items():  # fmt: skip
    register(*overloads(_name), spec=OpSpec(factors=_loss_factors(_at), emit=_emit_mean(_at)))
    register(
        *overloads(f"{_name}_backward"),
        spec=OpSpec(factors=_loss_backward_factors, emit=_emit_mean(_at + 1), linear=first_operand),
    )

# ---- margins between classes ----


def _margins(x: int, weighted: bool) -> Callable[[Call, Placements, int], list[Strategy]]:
    """Sharded over samples. `x` is the position of the scores among the tensors; weights of classes come last."""

    def strategies(call: Call, given: Placements, size: int) -> list[Strategy]:
        tensors = call.inputs
        if tensors[x].ndim < 2:
            return []
        has_weight = weighted and len(tensors) > x + 2
        rows = [0 if s.ndim and not (has_weight and s is tensors[-1]) else None for s in tensors]
        outputs = [0 if s is not None and s.ndim else None for s in call.outputs]
        return [sharded_strategy(call, rows, outputs, b, Partial()) for b in equal_blocks_of(given, rows)]

    return strategies


for _name, _at, _weighted in (("multi_margin_loss", 5, True), ("multilabel_margin_loss", 2, False)):
    _forward = _name if _weighted else f"{_name}_forward"
    register(*overloads(_forward), spec=OpSpec(strategies=_margins(0, _weighted), emit=_emit_mean(_at)))
    register(
        *overloads(f"{_name}_backward"),
        spec=OpSpec(strategies=_margins(1, _weighted), emit=_emit_mean(_at + 1), linear=first_operand),
    )

# ---- nll_loss, nll_loss2d: (self, target, weight, reduction, ignore_index) -> loss, total weight ----


def _class_dim(call: Call, x: int) -> int:
    return min(1, call.inputs[x].ndim - 1)


def _target_dims(call: Call, x: int) -> list[tuple[int, int]]:
    """Pairs of dims that scores and target share: (of the scores, of the target)."""
    ndim = call.inputs[x].ndim
    return [(d, d - (d > 1)) for d in range(ndim) if d != 1] if ndim > 1 else []


def _nll_strategies(call: Call, given: Placements, size: int) -> list[Strategy]:
    """Sharded over the batch a partial sum, except that a mean needs the sum of weights first; over classes a partial
    sum."""
    classes, reduction = _class_dim(call, 0), call.args[3]
    weight = (REPLICATE,) * (len(call.inputs) - 2)
    found = []
    for d, t in _target_dims(call, 0) if reduction != MEAN else ():
        for b in equal_blocks_of(given[:2], (d, t)):
            out: Placements = (Shard(t, b), REPLICATE) if reduction == 0 else (Partial(), Partial())
            found.append(Strategy((Shard(d, b), Shard(t, b), *weight), out))
    found += [
        Strategy((Shard(classes, b), REPLICATE, *weight), (Partial(), REPLICATE), _emit_nll_classes)
        for b in equal_blocks_of(given[:1], (classes,))
    ]
    return found


def _emit_nll_classes(builder: Builder, call: Call, strategy: Strategy, args: Args, kwargs: Kwargs) -> Emitted:
    """Every rank looks up the targets among its classes; other targets count zero on it."""
    scores, target, weight, reduction, ignore = args
    counts, index, nothing, dim = _targets_here(builder, call, strategy, 0, (scores, target, weight, ignore))
    index = builder.call(aten.unsqueeze.default, index, dim)
    picked = builder.call(aten.squeeze.dim, builder.call(aten.gather.default, scores, dim, index), dim)
    dtype = builder.dtype(scores)
    if dtype in (torch.float16, torch.bfloat16):  # the kernel too sums in float32 and rounds once
        picked, counts = (builder.call(aten._to_copy.default, v, dtype=torch.float32) for v in (picked, counts))
    loss = builder.call(aten.neg.default, builder.call(aten.mul.Tensor, picked, counts))
    loss = builder.call(aten.masked_fill.Scalar, loss, nothing, 0)
    total = builder.call(aten.sum.default, counts)
    if reduction == 0:
        return _rounded(builder, loss, dtype), _rounded(builder, builder.call(aten.zeros_like.default, total), dtype)
    loss = builder.call(aten.sum.default, loss)
    loss = builder.call(aten.div.Tensor, loss, total) if reduction == MEAN else loss
    return _rounded(builder, loss, dtype), _rounded(builder, total, dtype)


def _rounded(builder: Builder, value: Node, dtype: torch.dtype) -> Node:
    same = builder.dtype(value) == dtype
    return value if same else builder.call(aten._to_copy.default, value, dtype=dtype)


def _targets_here(
    builder: Builder, call: Call, strategy: Strategy, x: int, given: tuple[Node, Node, Node | None, int]
) -> tuple[Node, Node, Node, int]:
    """The targets among this rank's classes, if input `x`, the scores, is sharded over classes.

    `given` is (scores, target, weight, ignore_index). Returns the weight of each target, its index among this rank's
    classes (0 if it is none of them or ignored), a mask of those targets, and the dim of the classes.
    """
    scores, target, weight, ignore = given
    part = strategy.inputs[x]
    assert isinstance(part, Shard)
    ignored = builder.call(aten.eq.Scalar, target, ignore)
    counts = _weights(builder, target, weight, ignored, builder.dtype(scores))
    local, outside = local_index(builder, target, call.inputs[x].shape[part.dim], part.blocks)
    nothing = builder.call(aten.logical_or.default, outside, ignored)
    return counts, masked(builder, local, nothing, 0), nothing, part.dim


def _weights(builder: Builder, target: Node, weight: Node | None, ignored: Node, dtype: torch.dtype) -> Node:
    """The weight of each target: its class's weight or 1, and 0 if it is ignored."""
    if weight is None:
        return builder.call(aten._to_copy.default, builder.call(aten.logical_not.default, ignored), dtype=dtype)
    found = builder.call(aten.index.Tensor, weight, [masked(builder, target, ignored, 0)])
    return builder.call(aten.masked_fill.Scalar, found, ignored, 0)


def _nll(x: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore_index: int) -> tuple[Tensor, Tensor]:
    dim = min(1, x.ndim - 1)
    ignored = target == ignore_index
    safe = target.masked_fill(ignored, 0)
    counts = ignored.logical_not().to(x.dtype) if weight is None else weight[safe].masked_fill(ignored, 0)
    counts = widened(counts)
    loss = -widened(x.gather(dim, safe.unsqueeze(dim)).squeeze(dim)) * counts
    loss, total = loss.masked_fill(ignored, 0), counts.sum()
    if reduction == 0:
        return loss.to(x.dtype), torch.zeros_like(total).to(x.dtype)
    return (loss.sum() / total if reduction == MEAN else loss.sum()).to(x.dtype), total.to(x.dtype)


def _nll_backward_strategies(call: Call, given: Placements, size: int) -> list[Strategy]:
    """(grad, self, target, weight, reduction, ignore_index, total_weight): self gives only its shape."""
    classes = _class_dim(call, 1)
    whole: Placement = REPLICATE
    rest = (whole,) * (len(call.inputs) - 3)
    found = []
    for d, t in _target_dims(call, 1):
        for b in equal_blocks_of(given[1:3], (d, t)):
            grad = Shard(t, b) if call.inputs[0].ndim else whole
            found.append(Strategy((grad, Shard(d, b), Shard(t, b), *rest), (Shard(d, b),)))
    found += [
        Strategy((whole, Shard(classes, b), whole, *rest), (Shard(classes, b),), _emit_nll_backward_classes)
        for b in equal_blocks_of(given[1:2], (classes,))
    ]
    return found


def _emit_nll_backward_classes(builder: Builder, call: Call, strategy: Strategy, args: Args, kwargs: Kwargs) -> Emitted:
    grad, scores, target, weight, reduction, ignore, total = args
    counts, index, nothing, dim = _targets_here(builder, call, strategy, 1, (scores, target, weight, ignore))
    if reduction == MEAN:
        grad = builder.call(aten.div.Tensor, grad, total)
    values = builder.call(aten.neg.default, builder.call(aten.mul.Tensor, counts, grad))
    values = builder.call(aten.masked_fill.Scalar, values, nothing, 0)
    zeros = builder.call(aten.zeros_like.default, scores)
    index, values = (builder.call(aten.unsqueeze.default, v, dim) for v in (index, values))
    return builder.call(aten.scatter.src, zeros, dim, index, values)


register(
    *overloads("nll_loss_forward", "nll_loss2d_forward"),
    spec=OpSpec(strategies=_nll_strategies, decompose=_nll, role="class loss"),
)
register(
    *overloads("nll_loss_backward", "nll_loss2d_backward"),
    spec=OpSpec(strategies=_nll_backward_strategies, linear=first_operand, formats=True),
)

# ---- connectionist temporal classification: samples are free ----

register(torch.ops.plait.ctc_loss.default, spec=OpSpec(factors=einsum("T n C, n S, n, n -> n, n T A")))
register(
    torch.ops.plait.ctc_loss_backward.default,
    spec=OpSpec(factors=einsum("n, T n C, n S, n, n, n, n T A -> T n C")),
)
