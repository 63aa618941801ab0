"""The auxiliary outputs of losses on several ranks, each for its own rows, put together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from plait.backends.backend import StepResult
from plait.comm.protocol import Comm
from plait.compile.capture.loss_values import RATIO, ROWS, LossPart, Outputs
from plait.engine.local_batch import LocalBatch
from plait.errors import LossError


def gather_outputs(comm: Comm, outputs: Outputs, rows: float, device: torch.device) -> list[Outputs]:
    """The outputs of every rank of the group, in order; this rank's outputs are of `rows` rows. All ranks must call
    it."""
    every: list[Outputs] = [{} for _ in range(comm.size)]
    mine = torch.tensor([float(rows)], dtype=torch.float64, device=device)
    sizes: list[float] = _gather(comm, mine).flatten().tolist()
    most = int(max(sizes))
    for name, part in outputs.items():
        value = part.value.to(device)
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
