"""Splits a batch into microbatches, and joins their losses and gradients to those of the whole batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from plait.backends.backend import StepResult
from plait.compile.capture.batch import take_rows
from plait.engine.local_batch import LocalBatch, num_rows
from plait.errors import UnevenBatchError
from plait.plan.legality import uneven_micro


def microbatches(batch: Any, num: int) -> list[Any]:
    """The batch's rows in `num` equal parts, in order; for a LocalBatch, this rank's rows of each part.

    Raises BatchError if `num` does not divide the rows.
    """
    if num == 1:
        return [batch]
    local = isinstance(batch, LocalBatch)
    tree = batch.tree if local else batch
    rows = _num_here(batch)
    if refusal := uneven_micro(num, rows, "each rank's part of the batch" if local else "the batch"):
        raise UnevenBatchError(refusal)
    step = rows // num
    parts = []
    for index in range(num):
        part = take_rows(tree, rows, index * step, step)
        if local:
            part = dataclasses.replace(batch, tree=part, local_size=step, global_size=batch.global_size // num)
        parts.append(part)
    return parts


def first_microbatch(batch: Any, num: int) -> Any:
    """The first of `num` microbatches; the whole batch if `num` does not divide it, as may be in an evaluation."""
    return batch if _num_here(batch) % num else microbatches(batch, num)[0]


def step_key(seed: int, step: int) -> int:
    """The key of a step's random draws."""
    return (seed * 0x9E3779B1 + step) & ((1 << 62) - 1)


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
            torch._foreach_mul_(gradients, factor.to(gradients[0].device, dtype))
    aux = None if last.aux is None else tuple(each for r in results for each in r.aux or ())
    return StepResult(loss, parts, last.gradients, last.buffers, 1.0 if factor is None else float(factor), aux)


def _num_here(batch: Any) -> int:
    """The number of rows on this rank."""
    return batch.local_size if isinstance(batch, LocalBatch) else num_rows(batch)
