"""The loss of one device: what every plan is compared with."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from plait.graph.pipeline import Pipeline
from plait.graph.precision import Precision
from plait.graph.random import GlobalRandom
from plait.run.compiler import LossFn
from plait.run.local_batch import batch_part
from plait.run.microbatch import micro_key, microbatches
from plait.spec.plan import Plan


def one_device_pair(model: nn.Module, loss_fn: LossFn, batch: Any, num_parts: int = 1) -> tuple[Tensor, Any]:
    """The loss on the whole batch by the model itself, as (sum, weight); with several parts, part after part, for local
    batch norm."""
    if num_parts == 1:
        return as_pair(loss_fn(model, batch))
    buffers = {name: b.clone() for name, b in model.named_buffers()}
    parts = []
    kept: dict[str, Tensor] = {}
    for index in range(num_parts):
        for name, buffer in model.named_buffers():
            buffer.data.copy_(buffers[name])
        parts.append(as_pair(loss_fn(model, batch_part(batch, index, num_parts))))
        if index == 0:  # running statistics are rank 0's
            kept = {name: b.clone() for name, b in model.named_buffers()}
    for name, buffer in model.named_buffers():
        buffer.data.copy_(kept[name])
    return torch.stack([s for s, _ in parts]).sum(), sum(torch.as_tensor(w) for _, w in parts)


def one_device_step(
    model: nn.Module, loss_fn: LossFn, batch: Any, plan: Plan, key: int, num_parts: int = 1, scale: float = 1.0
) -> Tensor:
    """Loss and gradients of a whole step on one device: the plan's microbatches one after the other, in its precision.

    Gradients are those of the mean of the losses, or of the sum of sums over the sum of weights.
    """
    precision = Precision(plan.precision, plan.exceptions)
    device = next((p.device.type for p in model.parameters()), "cpu")
    losses: list[Tensor] = []
    total: Tensor | float = 0.0
    weights: Tensor | float = 0.0
    for index, part in enumerate(microbatches(batch, plan.micro)):
        with GlobalRandom(micro_key(key, index)):
            with precision.computing(model, device):
                pair = one_device_pair(model, loss_fn, part, num_parts)
                if plan.micro == 1:
                    pair = (pair[0] / pair[1], 1.0)
            (pair[0].float() * scale).backward()
        losses.append(pair[0].detach())
        weights = weights + torch.as_tensor(pair[1]).detach()
    total = torch.stack([one.float() for one in losses]).sum()
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad /= torch.as_tensor(weights * scale, dtype=parameter.grad.dtype)
    return total / weights


def stale_step(
    model: nn.Module,
    loss_fn: LossFn,
    batch: Any,
    plan: Plan,
    key: int,
    pipeline: Pipeline,
    optimizer: torch.optim.Optimizer,
) -> Tensor:
    """A step of an asynchronous pipeline as its definition reads, on one device: losses, gradients and updates.

    Each microbatch goes through each stage, forward and backward, with the version of weights that the schedule gives
    it there (Schedule.version). After each group of microbatches the newest weights are updated by the mean of
    its gradients.
    """
    precision = Precision(plan.precision, plan.exceptions)
    schedule, named = pipeline.schedule, dict(model.named_parameters())
    device = next(iter(named.values())).device.type
    history = [{name: p.detach().clone() for name, p in named.items()}]
    totals: list[Tensor] = []
    weights: list[Tensor] = []
    for micro, part in enumerate(microbatches(batch, plan.micro)):
        first, num = pipeline.groups[micro]
        for name, parameter in named.items():
            rank, _ = schedule.where(pipeline.stages[name][0], micro)
            parameter.data.copy_(history[schedule.version(rank, micro)][name])
        with GlobalRandom(micro_key(key, micro)):
            with precision.computing(model, device):
                total, weight = one_device_pair(model, loss_fn, part)
                loss = total / weight
            (loss.float() / num).backward()
        totals.append(total.detach().float())
        weights.append(torch.as_tensor(weight).detach().float())
        if micro == first + num - 1:
            for name, parameter in named.items():
                parameter.data.copy_(history[-1][name])
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            history.append({name: p.detach().clone() for name, p in named.items()})
    return torch.stack(totals).sum() / torch.stack(weights).sum()


def as_pair(loss: Any) -> tuple[Tensor, Any]:
    """(sum, weight); a mean counts as a sum of weight one."""
    return (loss[0], loss[1]) if isinstance(loss, (tuple, list)) else (loss.reshape(()), 1.0)
