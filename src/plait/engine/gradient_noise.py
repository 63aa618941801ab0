"""Measures the gradient noise scale of a run: at some steps the gradient of a few of the batch's rows, too.

The few rows take the places of all rows, each several times. The step then has the shapes that it always has, so that
it needs no other program, whatever the plan; its mean gradient is that of the few.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor

from plait.compile.capture.batch import at_rows, map_rows
from plait.compile.ops.draw import micro_key
from plait.compile.stages.split import updates_within
from plait.cost.noise_scale import NoiseSample, RunningNoise
from plait.engine.engine import Engine
from plait.engine.local_batch import LocalBatch, num_rows
from plait.errors import PlanError
from plait.plan.plan import Plan

_MOST = 8  # times that a row is repeated: fewer rows tell more of the noise, and less of the gradient


class NoiseMeter:
    """The noise of the gradients of an engine's steps, at every n-th step.

    Args:
        engine: what trains. Its numbers stay the same: what the measurement changes is put back.
        every: the number of steps from one measurement to the next. Each takes as long as the rest of a step.

    Masks of dropout differ between the repetitions of a row, so their noise is not counted. Raises PlanError for a
    plan whose steps have no gradient of the whole batch.
    """

    def __init__(self, engine: Engine, every: int) -> None:
        check_noise_every(every, engine.plan)
        self.running = RunningNoise()
        self.last: NoiseSample | None = None  # of the last step, if it was measured
        self._engine, self._every = engine, every
        self._few: tuple[int, float, int] | None = None  # rows, the norm of their mean gradient, all rows
        self._num_waiting = 0  # batches since the last update

    def before(self, batch: Any) -> None:
        """Measure the gradient of a few rows, if it is time. All ranks call it, before each forward_backward."""
        self._num_waiting += 1
        if self._num_waiting > 1:
            self._few = None  # the update is by the gradient of several batches
        elif self._engine.state.step_number % self._every == 0:
            self._few = self._measure(batch)

    def after(self) -> None:
        """Measure the gradient of all rows, if that of the few is known. All ranks call it, before each update."""
        few, self._few, self.last, self._num_waiting = self._few, None, None, 0
        if few is None:
            return
        rows, norm, of_rows = few
        whole = float(self._engine.executor.gradient_norm())
        if math.isfinite(norm) and math.isfinite(whole):  # of fp16 it may not be
            self.last = NoiseSample.of_norms(rows, norm, of_rows, whole)
            self.running.add(self.last)

    def drop(self) -> None:
        """Forget the gradients that wait for an update."""
        self._few, self._num_waiting = None, 0

    def _measure(self, batch: Any) -> tuple[int, float, int] | None:
        engine = self._engine
        batch = engine.padded(batch).batch
        if isinstance(batch, LocalBatch) and batch.padding:
            return None  # the rows of weight zero are not the same part of each rank's
        self._check()
        repeated, few = repeat_few(batch, engine.plan)
        executor = engine.executor
        before = {name: buffer.clone() for name, buffer in executor.buffers.items()}
        result = engine.run(repeated, micro_key(engine.key(), 0))
        executor.set_gradients(result.gradients)
        norm = float(executor.gradient_norm())
        engine.zero_grad()
        with torch.no_grad():
            for name, buffer in before.items():
                executor.buffers[name].copy_(buffer)
        return few, norm, num_rows(batch)

    def _check(self) -> None:
        """Raise PlanError for a step that cannot be run once more without a trace."""
        executor = self._engine.executor
        if executor.sharding.gradients_away:
            raise PlanError(
                f"noise_every={self._every} reads gradients, which {self._engine.plan.title!r} keeps off the device;"
                " measure under a plan without home.parameters= and central=, or leave noise_every out"
            )
        if executor.compiled is None:
            return
        captured = executor.compiled.program.captured
        written = [o.name for o in captured.outputs if o.kind == "buffer" and o.name in captured.outside]
        changes = self._engine.compiler.captures.changes.get(id(captured))
        written += [effect.place for effect in changes.effects] if changes is not None else []
        if written:
            raise PlanError(
                f"noise_every={self._every} runs some batches twice, and the step changes {written[0]} each time; make"
                " it a buffer of the model, which is put back, or leave noise_every out"
            )


def check_noise_every(every: int, plan: Plan, rows: int | None = None) -> None:
    """Raise PlanError if the noise of the plan's gradients cannot be measured at every so many steps, in batches of
    `rows` of which each process loads its own."""
    if every < 1:
        raise PlanError(f"noise_every={every}: the steps from one measurement of the noise to the next are at least 1")
    why = ""
    if plan.workers:
        why = "parameter servers add up what workers send, each by itself"
    elif plan.relaxed_axis:
        why = "replicas that agree later have no gradient of the whole batch"
    elif updates_within(plan):
        why = f"schedule={plan.schedule} has no gradient of the whole batch"
    elif plan.backend != "torch":
        why = f"backend={plan.backend} takes forward, backward and update as one program"
    if why:
        raise PlanError(
            f"noise_every={every} measures gradients under {plan.title!r}: {why}; measure under a synchronous plan with"
            " backend=torch, as the noise scale depends on model and data, not on the plan"
        )
    if rows is not None and rows // plan.num_process_parts < 2:
        raise PlanError(_one_row(rows, plan))


def _one_row(rows: int, plan: Plan) -> str:
    return (
        f"noise_every= compares gradients of few rows and of many, and a rank has one of the batch's {rows} (plan"
        f" {plan.title!r}); give a batch of at least {2 * rows} rows, or measure on fewer ranks"
    )


def repeat_few(batch: Any, plan: Plan) -> tuple[Any, int]:
    """A batch of the same shapes with its first rows repeated, for a LocalBatch those of each rank, and the number of
    different rows.

    Raises PlanError if there is one row.
    """
    local = isinstance(batch, LocalBatch)
    tree, size = (batch.tree, batch.local_size) if local else (batch, num_rows(batch))
    times = max(each for each in range(1, _MOST + 1) if size % each == 0)
    if times == 1:  # a prime number of rows
        times = size
    if times == 1:
        raise PlanError(_one_row(num_rows(batch), plan))
    places = torch.arange(size // times).repeat(times)

    def repeated(leaf: Tensor, dim: int) -> Tensor:
        return at_rows(leaf, dim, places.to(leaf.device))

    found = map_rows(repeated, tree, size)
    return dataclasses.replace(batch, tree=found) if local else found, num_rows(batch) // times
