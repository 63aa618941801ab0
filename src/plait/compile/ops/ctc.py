"""Connectionist temporal classification (Graves et al. 2006) as an op that reads lengths from tensors.

PyTorch's ctc_loss turns the lengths into Python numbers, which a graph does not have. These ops keep them as tensors,
and their results have the shapes for the longest possible target.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import _reduction

from plait.errors import CaptureError

aten = torch.ops.aten


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
def _(log_probs: Tensor, targets: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
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
def _(grad: Tensor, log_probs: Tensor, *rest: Any) -> Tensor:
    return torch.empty_like(log_probs)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
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
    input_lengths: Any,
    target_lengths: Any,
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
    loss, _ = ctc_loss(log_probs.contiguous(), targets, *lengths, blank, zero_infinity)
    if zero_infinity:
        loss = torch.where(loss == float("inf"), torch.zeros_like(loss), loss)
    if reduction in ("mean", _reduction.get_enum("mean")):
        return (loss / lengths[1].clamp(min=1).to(loss.dtype)).mean()
    return loss.sum() if reduction in ("sum", _reduction.get_enum("sum")) else loss
