"""memory: predicts the bytes that a training step takes on each rank of a plan. Nothing is run."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Hashable
from typing import Any

import torch
from torch import nn

from plait.backends.eager.passes import eager_graphs
from plait.comm.device import default_kind, is_host
from plait.compile.capture.capture import LossFn
from plait.compile.rank_program import RankProgram
from plait.compile.stage_costs import cut_within
from plait.cost.memory_model import GRADIENTS, OPTIMIZER, PARAMETERS, RankMemory, single_changes
from plait.engine.arguments import check_arguments
from plait.engine.compiler import Captures, Compiler
from plait.engine.dry_run import dry_run
from plait.engine.local_batch import batch_of_replica, num_rows
from plait.engine.local_sgd.replicas import bytes_kept
from plait.engine.rank_optimizers import OptimizerFactory
from plait.engine.setup_checks import check_given, check_plan, check_step
from plait.errors import PlanError
from plait.plan.annotation import Annotations
from plait.plan.axes import stage_axis
from plait.plan.plan import Plan
from plait.report.memory_table import MemoryEstimate
from plait.spec.layout import Only

_ADAMW = functools.partial(torch.optim.AdamW, lr=1e-3)


def memory(
    model: nn.Module,
    loss_fn: LossFn,
    batch: Any,
    plan: Plan | str,
    *,
    optimizer: OptimizerFactory = _ADAMW,
    layouts: Annotations | None = None,
) -> MemoryEstimate:
    """Predict the bytes of tensors on each rank over a step on a global batch.

    Args:
        model: the model, which may be on the meta device; no memory of its size is allocated.
        loss_fn: as the Trainer takes it.
        batch: a global batch.
        plan: a Plan or its text.
        optimizer: as the Trainer takes it.
        layouts: annotations of parameters by name pattern.

    Returns a MemoryEstimate: print it, or ask `.peak` and `.fits(limit)`, in bytes. It does not count the runtime's own
    memory, workspaces of kernels, and memory that an allocator cannot reuse.

    Raises PlanError, LayoutError or CaptureError as the Trainer would.
    """
    check_given(model, loss_fn, optimizer)
    check_arguments(layouts=layouts)
    return Estimator(model, loss_fn, batch, optimizer, layouts).estimate(Plan.of(plan))


class Estimator:
    """Estimates plans for one model and batch, with one capture for all of them. Arguments are those of `memory`.

    `built` says whether every rank builds the model with its values; by default whether this model has values.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFn,
        batch: Any,
        optimizer: OptimizerFactory = _ADAMW,
        layouts: Annotations | None = None,
        built: bool | None = None,
    ) -> None:
        self._device = torch.device(default_kind())  # the device that a process would use
        self._captures = Captures(model, loss_fn, self._device)
        self._batch = batch
        self._optimizer = optimizer
        self._layouts = layouts
        self._built = not any(p.is_meta for p in model.parameters()) if built is None else built
        self._last: tuple[Plan, RankProgram] | None = None

    def estimate(self, plan: Plan) -> MemoryEstimate:
        """The memory of each rank of the plan. Offloaded tensors count as if they were on the device.

        Raises PlanError for a plan with parameter servers, or for another backend.
        """
        if plan.workers:
            how = f"as {str(plan.inner_plan)!r}" if str(plan.inner_plan) else "on one device"
            raise PlanError(
                f"the memory of parameter servers is not predicted; a worker computes {how}, without the optimizer's"
                " state, which the servers share"
            )
        if plan.backend != "torch":
            raise PlanError(
                f"the memory of backend={plan.backend} is not predicted, because XLA decides what it keeps; the same"
                " plan without it says what ranks of PyTorch would take"
            )
        homes: dict[str, Any] = {f.name: f.default for f in dataclasses.fields(Plan) if f.name.startswith("home")}
        given, plan = plan, dataclasses.replace(plan.inner_plan, **homes)
        padded = Compiler(self._captures, plan).padded(self._batch)
        batch, kept = batch_of_replica(padded, given), bytes_kept(given)
        if not is_host(self._device):
            plan = plan.with_own_parameters()
        program = self._program(batch, plan)
        model = self._captures.model
        found: dict[Hashable, tuple[list[int], RankMemory]] = {}
        for number in range(given.mesh.size):
            here = given.mesh.coordinates(number)
            rank = plan.mesh.rank(here | dict.fromkeys([given.relaxed_axis] if given.relaxed_axis else [], 0))
            kind = _kind(program, rank)
            if kind not in found:
                shared = is_host(self._device)  # the ranks of one host; several hosts take less
                each = dry_run(program, model, batch, self._optimizer, self._device, rank, shared)
                each = each.with_more(OPTIMIZER, kept * each.updated)
                found[kind] = ([], each if self._built else each.without_start())
            found[kind][0].append(number)
        num_parameters = sum(math.prod(layout.shape) for layout in program.sharding.states.values())
        return MemoryEstimate(given, num_parameters, tuple((tuple(ranks), each) for ranks, each in found.values()))

    def program(self, plan: Plan) -> RankProgram:
        """The program of the plan's ranks. Raises PlanError, LayoutError and BatchError as the Trainer would."""
        return self._program(batch_of_replica(self._batch, plan), plan.inner_plan)

    def _program(self, batch: Any, plan: Plan) -> RankProgram:
        if self._last is None or self._last[0] != plan:
            check_plan(plan, self._captures.model, None)
            compiler = Compiler(self._captures, plan, self._layouts)
            self._last = plan, check_step(compiler, batch, plan).program
        return self._last[1]

    def until_it_fits(self, plan: Plan, limit: int) -> list[MemoryEstimate]:
        """Estimate plans that differ from `plan` in one key, up to the first that takes at most `limit` bytes on every
        rank. Returns all estimates."""
        found: list[MemoryEstimate] = []
        for other in [*self._cuts(plan, limit), *single_changes(plan, num_rows(self._batch))]:
            try:
                found.append(self.estimate(other))
            except PlanError:  # such as recompute=layer of a model without layers
                continue
            if found[-1].fits(limit):
                break
        return found

    def _cuts(self, plan: Plan, limit: int) -> list[Plan]:
        """The plan with another cut of its pipeline, if one is likely to take at most `limit` bytes on every rank."""
        if plan.mesh.axis_size(stage_axis()) == 1:
            return []
        batch = batch_of_replica(self._batch, plan)
        program = self._program(batch, plan.inner_plan)
        now = self.estimate(plan)
        peaks: dict[int, int] = {}
        for ranks, each in now.ranks:
            for place in {plan.mesh.coordinates(rank)[stage_axis()] for rank in ranks}:
                peaks[place] = max(peaks.get(place, 0), each.peak)
        most = now.fullest.most
        states = sum(most.get(c, 0) for c in (PARAMETERS, GRADIENTS, OPTIMIZER)) / max(most.get(PARAMETERS, 0), 1)
        names = cut_within(program, program.of_cells(eager_graphs(program)), peaks, states, limit)
        return [] if names is None or names == plan.cut else [dataclasses.replace(plan, cut=names)]


def _kind(program: RankProgram, rank: int) -> Hashable:
    """A key that is equal for ranks that take the same memory: the shapes of their parts, and which graphs they run."""
    mesh = program.plan.mesh
    here = mesh.coordinates(rank)
    shapes = tuple(layout.local_shape(mesh, here) for layout in program.sharding.states.values())
    only = {axis for layout in program.layouts.values() for axis, p in layout.placements if isinstance(p, Only)}
    only |= {stage_axis()} if program.pipeline is not None else set()
    return shapes, tuple(here[axis] for axis in sorted(only))
