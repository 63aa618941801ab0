"""The results of steps: the losses and gradients of microbatches joined, and auxiliary outputs gathered from ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from plait.backends.backend import StepResult
from plait.comm.protocol import Comm
from plait.compile.capture.loss_values import RATIO, ROWS, LossPart, Outputs
from plait.compile.capture.parts_left_out import COUNTS
from plait.engine.local_batch import LocalBatch
from plait.errors import LossError


def joined(results: Sequence[StepResult], scale: Tensor | None = None) -> StepResult:
    """The result of a step from those of its microbatches. The last one has the sums of the gradients.

    `scale` is the loss scale, by which the gradients are divided.
    """
    last = results[-1]
    loss, parts, factor = last.loss, last.parts, None
    if len(results) > 1:
        if parts is None:
            loss = torch.stack([r.loss for r in results]).mean()
            factor = torch.full((), 1 / len(results), dtype=torch.float64)
        else:
            total = torch.stack([r.parts[0] for r in results if r.parts]).sum()
            weight = torch.stack([r.parts[1] for r in results if r.parts]).sum()
            loss, parts, factor = total / weight, (total, weight), 1 / weight.double()
    if scale is not None:
        factor = (1.0 if factor is None else factor) / scale.double()
    if factor is not None and last.gradients:
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for gradient in last.gradients.values():
            by_dtype.setdefault(gradient.dtype, []).append(gradient)
        for dtype, gradients in by_dtype.items():
            torch._foreach_mul_(gradients, factor.to(gradients[0].device, dtype, non_blocking=True))
    aux = None if last.aux is None else tuple(each for r in results for each in r.aux or ())
    return StepResult(loss, parts, last.gradients, last.buffers, 1.0 if factor is None else factor, aux)


def without_counts(result: StepResult, has_outputs: bool) -> StepResult:
    """The result of a step, with the counts of what it left out apart from the outputs that the loss function returned,
    if it did."""
    if not result.aux or COUNTS not in result.aux[0]:
        return result
    counts = tuple(each[COUNTS].value for each in result.aux)
    aux = tuple({name: part for name, part in each.items() if name != COUNTS} for each in result.aux)
    return replace(result, aux=aux if has_outputs else None, counts=counts)


def gather_outputs(comm: Comm, outputs: Outputs, sizes: Sequence[float], device: torch.device) -> list[Outputs]:
    """The outputs of every rank of the group, in order; `sizes` are the numbers of their rows. All ranks must call
    it."""
    every: list[Outputs] = [{} for _ in range(comm.size)]
    most = int(max(sizes))
    for name, part in outputs.items():
        value = part.value.to(device, non_blocking=True)
        if part.kind == ROWS and len(value) < most:  # an all-gather needs tensors of one shape
            value = torch.cat([value, value.new_zeros((most - len(value), *value.shape[1:]))])
        values = _gather(comm, value).unbind()
        weights: Sequence[Tensor | float] = sizes
        if part.kind == RATIO:
            weights = _gather(comm, torch.as_tensor(part.weight, device=device)).unbind()
        for rank, (found, weight) in enumerate(zip(values, weights, strict=True)):
            every[rank][name] = LossPart(part.kind, found[: int(sizes[rank])] if part.kind == ROWS else found, weight)
    return every


def refuse_padding(batch: Any, result: StepResult) -> None:
    """Raise LossError for a mean over the rows of a batch that is padded with rows of weight zero."""
    if isinstance(batch, LocalBatch) and batch.padding and result.parts is None:
        raise LossError(
            f"the batch is padded with {batch.padding} rows of weight zero, which a mean over its rows counts; return"
            " plait.Weighted((losses * weights).sum(), weights.sum()) with the weights that row_weights= puts into the"
            " batch, or drop a short last batch with drop_last=True"
        )


def without_padding(batch: Any, outputs: Outputs) -> Outputs:
    """The outputs of a global batch, without its padding rows."""
    if not isinstance(batch, LocalBatch) or not batch.padding:
        return outputs
    rows = batch.global_size - batch.padding
    return {n: replace(part, value=part.value[:rows]) if part.kind == ROWS else part for n, part in outputs.items()}


def _gather(comm: Comm, tensor: Tensor) -> Tensor:
    return comm.all_gather(tensor.contiguous()).wait()
