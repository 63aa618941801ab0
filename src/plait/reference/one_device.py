"""A training step on one device, with which every plan is compared."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from plait.comm.hidden_group import without_process_group
from plait.compile.capture.capture import LossFn
from plait.compile.capture.capture_errors import users_line
from plait.compile.capture.loss_values import Loss, Outputs, copied, join_outputs, read_loss
from plait.compile.capture.precision import Precision
from plait.compile.capture.reentrant_checkpoint import without_reentrance
from plait.compile.ops.draw import micro_key
from plait.compile.ops.random import GlobalRandom
from plait.compile.stages.split import Pipeline
from plait.engine.local_batch import microbatches, num_rows
from plait.engine.model_copy import Twin
from plait.plan.plan import Plan

_SIGNATURES = {  # torch.batch_norm has no Python signature
    F.batch_norm: inspect.signature(F.batch_norm),
    torch.batch_norm: inspect.signature(
        lambda input, weight, bias, running_mean, running_var, training, momentum, eps, cudnn_enabled: None
    ),
}


class LocalBatchNorm(TorchFunctionMode):
    """Computes on one device what batchnorm=local computes.

    While it is entered, each of `num_parts` equal runs of rows has batch-norm statistics of its own in training. The
    running statistics are those of the first run, as PyTorch's DDP keeps those of rank 0.
    """

    def __init__(self, num_parts: int) -> None:
        super().__init__()
        self._num_parts = num_parts

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in (F.batch_norm, torch.batch_norm):
            return func(*args, **(kwargs or {}))
        bound = _SIGNATURES[func].bind(*args, **(kwargs or {}))
        given = bound.arguments
        if not given.get("training"):
            return func(*args, **(kwargs or {}))
        found = []
        for index, rows in enumerate(given["input"].chunk(self._num_parts)):
            given["input"] = rows
            if index:
                given["running_mean"] = given["running_var"] = None
            found.append(func(*bound.args, **bound.kwargs))
        return torch.cat(found)


class OneDevice(NamedTuple):
    """The result of a step on one device: its loss, the loss's weight if it has one, and the loss function's
    outputs."""

    loss: Tensor
    weight: float | None
    outputs: Outputs | None


def one_device_loss(model: nn.Module, loss_fn: LossFn, batch: Any, num_parts: int = 1) -> Loss:
    """The loss of the model on the whole batch; with several parts, with local batch norm."""
    with LocalBatchNorm(num_parts) if num_parts > 1 else nullcontext():
        found = read_loss(loss_fn(model, batch), num_rows(batch))
    return replace(found, outputs=None if found.outputs is None else copied(found.outputs))


def _backward(
    model: nn.Module,
    loss_fn: LossFn,
    part: Any,
    plan: Plan,
    key: int,
    num_parts: int,
    objective: Callable[[Loss], Tensor],
) -> Loss:
    """Forward and backward of one microbatch with this key: adds the gradients of `objective` of its loss."""
    precision = Precision(plan.precision, plan.exceptions)
    device = next((p.device.type for p in model.parameters()), "cpu")
    with (
        _installed(model) as (own, stand_ins),
        GlobalRandom(key),
        without_reentrance(),  # what backward computes again would draw other numbers
        precision.casting(own, stand_ins),
    ):
        try:
            with without_process_group(functools.partial(users_line, model, loss_fn)):
                with precision.computing(own, device):
                    found = one_device_loss(own, loss_fn, part, num_parts)
                objective(found).backward()
        except RuntimeError as error:
            if (refusal := precision.refusal(error, _module_of(error, own))) is None:
                raise
            raise refusal from error
    return found


def _module_of(error: BaseException, model: nn.Module) -> str:
    """The name of the innermost module whose forward raised the error; "" if none did."""
    names, found, traceback = {id(each): name for name, each in model.named_modules()}, "", error.__traceback__
    while traceback is not None:
        found = names.get(id(traceback.tb_frame.f_locals.get("self")), found)
        traceback = traceback.tb_next
    return found


@contextmanager
def _installed(model: nn.Module) -> Iterator[tuple[nn.Module, Mapping[int, Tensor]]]:
    """Context in which the user's model has the values of a twin. Yields it, and the twin's tensors by the ids of the
    model's own."""
    if not isinstance(model, Twin):
        yield model, {}
        return
    with model.installed() as own:
        yield own, model.stand_ins


def one_device_step(
    model: nn.Module, loss_fn: LossFn, batch: Any, plan: Plan, key: int, num_parts: int = 1, scale: float = 1.0
) -> OneDevice:
    """One step without its update: the plan's microbatches one after the other, in the plan's precision.

    Args:
        model: the model; its gradients are accumulated.
        loss_fn: called with the model and a microbatch.
        batch: the global batch.
        plan: gives the number of microbatches and the precision.
        key: the step's random key.
        num_parts: runs of rows with batch-norm statistics of their own.
        scale: factor of the loss in backward; gradients are divided by it.

    Loss and gradients are those of the mean over microbatches; for losses with weights, of the sum of the weighted
    losses over the sum of weights.
    """
    totals: list[Tensor] = []
    weights: list[Tensor] = []
    outputs = []
    weighted = False

    def total_of(loss: Loss) -> Tensor:
        return _wide(loss.mean if plan.micro == 1 else loss.total)

    for index, part in enumerate(microbatches(batch, plan.micro)):
        own_key = micro_key(key, index)
        found = _backward(model, loss_fn, part, plan, own_key, num_parts, lambda loss: total_of(loss) * scale)
        totals.append(total_of(found).detach())
        weights.append(torch.as_tensor(found.pair[1]).detach())
        outputs.append(found.outputs)
        weighted = found.weight is not None
    weight = torch.stack(weights).sum()
    over = torch.ones(()) if plan.micro == 1 else weight
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad /= torch.as_tensor(over * scale, dtype=parameter.grad.dtype)
    loss = torch.stack(totals).sum() / over
    return OneDevice(loss, float(weight) if weighted else None, _joined(outputs))


def _wide(value: Tensor) -> Tensor:
    """The value in float32, or in float64 if that is its dtype."""
    return value if value.dtype == torch.float64 else value.float()


def stale_step(
    model: nn.Module,
    loss_fn: LossFn,
    batch: Any,
    plan: Plan,
    key: int,
    pipeline: Pipeline,
    optimizer: torch.optim.Optimizer,
    num_parts: int = 1,
) -> OneDevice:
    """One step of an asynchronous pipeline by its definition, on one device: losses, gradients and updates.

    Each microbatch passes each stage, forward and backward, with the weight version that the schedule gives it there
    (`Schedule.version`). After each group of microbatches the newest weights are updated with the mean of the group's
    gradients. Arguments as one_device_step; `pipeline` has the schedule, and `optimizer` makes the updates.
    """
    schedule, named = pipeline.schedule, dict(model.named_parameters())
    history = [{name: p.detach().clone() for name, p in named.items()}]
    totals: list[Tensor] = []
    weights: list[Tensor] = []
    outputs = []
    for micro, part in enumerate(microbatches(batch, plan.micro)):
        first, num = pipeline.groups[micro]
        for name, parameter in named.items():
            rank, _ = schedule.where(pipeline.stages[name][0], micro)
            parameter.data.copy_(history[schedule.version(rank, micro)][name])
        mean_of = functools.partial(_mean_over, num)
        found = _backward(model, loss_fn, part, plan, micro_key(key, micro), num_parts, mean_of)
        total, weight = found.pair
        totals.append(_wide(total.detach()))
        weights.append(_wide(torch.as_tensor(weight).detach()))
        outputs.append(found.outputs)
        if micro == first + num - 1:
            for name, parameter in named.items():
                parameter.data.copy_(history[-1][name])
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            history.append({name: p.detach().clone() for name, p in named.items()})
    return OneDevice(torch.stack(totals).sum() / torch.stack(weights).sum(), None, _joined(outputs))


def _mean_over(num: int, loss: Loss) -> Tensor:
    """A microbatch's share in the mean over `num` of them."""
    return _wide(loss.mean) / num


def _joined(parts: Sequence[Outputs | None]) -> Outputs | None:
    found = [part for part in parts if part is not None]
    return join_outputs(found) if found else None
