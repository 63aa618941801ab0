"""The loss of batches without training on them."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any, Protocol

import torch
from torch import Tensor

from plait.compile.capture.loss_values import Outputs, join_outputs, results
from plait.engine.batch_padding import PaddedBatch
from plait.engine.executor import StepExecutor
from plait.engine.local_batch import LocalBatch, batches_of, check_values, num_rows
from plait.engine.same_batch import SameBatch
from plait.engine.step_results import refuse_padding, without_padding
from plait.engine.train_state import TrainState
from plait.errors import BatchError
from plait.plan.plan import Plan


class Evaluated(Protocol):
    """The parts of an Engine that an evaluation uses."""

    plan: Plan
    state: TrainState
    same: SameBatch

    @property
    def executor(self) -> StepExecutor: ...
    def prepare(self, batch: Any) -> bool: ...
    def padded(self, batch: Any, train: bool = True) -> PaddedBatch: ...
    def rows_here(self, batch: Any) -> Any: ...
    def key(self) -> int: ...


def evaluate(run: Evaluated, data: Any, known: str | None) -> Any:
    """The mean loss over the batches of `data`, and the auxiliary outputs if the loss has any; see Trainer.evaluate.

    `known` is the structure of the batches so far. The host waits for the device once, at the end. Raises BatchError if
    there is no batch.
    """
    sums: Tensor | None = None  # of the losses, and of their weights
    aux: list[Outputs] = []
    with ExitStack() as stack:
        for given in batches_of(data, known):
            check_values(given)
            run.prepare(given)
            if run.state.replicas is not None and sums is None:
                stack.enter_context(run.state.replicas.aggregated(run.state.step_number))
            padded = run.padded(given, train=False)
            batch = padded.batch
            whole = _is_uneven(run, batch)
            here = batch if whole else run.rows_here(batch)
            run.same.begin(batch, f"evaluation after step {run.state.step_number}")
            result = run.executor.run(here, run.key(), train=False)
            run.same.check()
            refuse_padding(batch, result)
            rows = num_rows(here)
            mean = result.loss.double()
            total, weight = result.parts or (mean * rows, torch.full_like(mean, rows))
            times = run.plan.mesh.axis_size(run.plan.relaxed_axis) if whole and run.state.replicas is not None else 1
            found = torch.stack([total.detach().double(), weight.detach().to(total.device).double()]) / times
            sums = found if sums is None else sums + found
            if result.aux is not None:
                every = result.aux if run.state.replicas is None or whole else run.state.replicas.outputs(result.aux)
                aux.append(padded.cropped(without_padding(batch, join_outputs(every))))
    if run.state.replicas is not None:
        sums = run.state.replicas.sum_of(torch.zeros(2, dtype=torch.float64) if sums is None else sums)
    loss, num = (0.0, 0.0) if sums is None else sums.tolist()
    if num == 0:
        raise BatchError("there was no batch to evaluate on")
    return (loss / num, results(join_outputs(aux))) if aux else loss / num


def _is_uneven(run: Evaluated, batch: Any) -> bool:
    """Whether each rank evaluates the whole batch, because the ranks do not divide it. Raises BatchError for a
    LocalBatch."""
    parts, rows = run.plan.num_process_parts, num_rows(batch)
    if run.executor.compiled is None or rows % parts == 0:
        return False
    if isinstance(batch, LocalBatch):
        raise BatchError(
            f"{parts} parts do not divide the batch of {rows} rows, of which each rank has its own (plan"
            f" {run.plan.title}); give a multiple of {parts}, or the whole batch on every rank"
        )
    return True
