"""simulate: predicts what a training step takes under a plan on a cluster. Nothing is run."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import nn

from plait.api.memory import Estimator
from plait.backends.eager.passes import eager_graphs
from plait.compile.capture.batch import batch_tensors
from plait.compile.capture.capture import LossFn
from plait.compile.ir.dtypes import dtype_named
from plait.compile.rank_program import RankProgram
from plait.compile.step_calls import gathers_after_update, step_program
from plait.cost.step_program import Call, OpCall, StepProgram
from plait.cost.step_simulation import StepSimulator
from plait.engine.local_batch import batch_of_replica, num_rows, num_tokens
from plait.engine.optimizer_step import StateEstimate
from plait.engine.optimizers import OptimizerFactory, make_optimizer
from plait.errors import PlanError, Refusal
from plait.optim.combined import each_parameter, title_of
from plait.plan.annotation import Annotations
from plait.plan.axes import stage_axis
from plait.plan.plan import Plan
from plait.report.step_prediction import StepPrediction
from plait.spec.cluster import Cluster
from plait.spec.cluster_file import find_cluster

_ADAMW = functools.partial(torch.optim.AdamW, lr=1e-3)


def simulate(
    model: nn.Module,
    loss_fn: LossFn,
    batch: Any,
    plan: Plan | str,
    cluster: Cluster | str,
    *,
    optimizer: OptimizerFactory = _ADAMW,
    layouts: Annotations | None = None,
    memory: bool = True,
) -> StepPrediction:
    """Predict what a step on a global batch takes under a plan on a cluster.

    The step is captured and lowered as the Trainer would, one rank for each place of the pipeline, and the calls of its
    graphs are simulated on the cluster: products, memory traffic, collectives by group, overlap, update.

    Args:
        model: the model, which may be on the meta device; its values are not read.
        loss_fn: as the Trainer takes it.
        batch: a global batch, which may be on the meta device.
        plan: a Plan or its text.
        cluster: a Cluster, or what `plait cluster show` takes: a name such as "h100x64", or a TOML file.
        optimizer: as the Trainer takes it.
        layouts: annotations of parameters by name pattern.
        memory: whether to predict the memory of each rank too, which takes as long again.

    Raises PlanError, LayoutError or CaptureError as the Trainer would; PlanError for a plan whose replicas agree later
    or with parameter servers, and for more ranks than the cluster has devices; ConfigError for a cluster that is not
    known.
    """
    simulator = Simulator(model, loss_fn, batch, cluster, optimizer=optimizer, layouts=layouts)
    return simulator.simulate(Plan.parse(plan) if isinstance(plan, str) else plan, memory)


class Simulator:
    """Simulates plans for one model, batch and cluster, with one capture for all of them. Arguments are those of
    `simulate`."""

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFn,
        batch: Any,
        cluster: Cluster | str,
        *,
        optimizer: OptimizerFactory = _ADAMW,
        layouts: Annotations | None = None,
        built: bool | None = None,
    ) -> None:
        self.cluster = find_cluster(cluster) if isinstance(cluster, str) else cluster
        self._estimator = Estimator(model, loss_fn, batch, optimizer, layouts, built)
        self._batch = batch
        self._optimizer = optimizer
        self._steps = StepSimulator(self.cluster)

    def simulate(self, plan: Plan, memory: bool = True) -> StepPrediction:
        """What a step of the plan takes."""
        if plan.workers or plan.relaxed_axis:
            why = "its workers push and pull at times of their own" if plan.workers else "its replicas agree later"
            inner = plan.inner_plan.title
            raise PlanError(Refusal(f"the plan {plan.title!r}", why, f"simulate the plan of one of them, {inner!r}"))
        program = self.program(plan)
        found = self._steps.simulate(program)
        return StepPrediction(plan, self.cluster, program, found, self._estimator.estimate(plan) if memory else None)

    def program(self, plan: Plan) -> StepProgram:
        """What the ranks of the plan issue in a step."""
        lowered = self._estimator.program(plan)
        rows = num_rows(self._batch)
        return step_program(
            lowered,
            eager_graphs(lowered),
            rows,
            num_tokens(self._batch),
            tuple(self._update(lowered, place) for place in range(_num_places(lowered))),
            _bytes_of(batch_of_replica(self._batch, plan)) // plan.num_batch_parts,
        )

    def _update(self, program: RankProgram, place: int) -> tuple[Call, ...]:
        """The calls of an update on a rank at this place."""
        mesh, sharding = program.plan.mesh, program.sharding
        here = dict.fromkeys(mesh.names, 0) | ({stage_axis(): place} if program.pipeline is not None else {})
        trained = {output.name for output in program.captured.outputs if output.kind == "gradient"}
        shapes = {
            name: (each.state.local_shape(mesh, here), dtype_named(each.state.dtype))
            for name, each in sharding.parameters.items()
            if name in trained and each.state.lies_at(here)
        }
        calls: list[Call] = []
        if shapes:
            twins = {n: nn.Parameter(torch.empty(s, dtype=d, device="meta")) for n, (s, d) in shapes.items()}
            made = make_optimizer(self._optimizer, list(twins.items()))
            estimate = StateEstimate(made)
            moved = elements = 0
            for group, parameter in each_parameter(made):
                # Parameters and state are read and written, gradients read.
                moved += 3 * parameter.numel() * parameter.itemsize
                moved += 2 * sum(estimate.state_bytes(group, tuple(parameter.shape), parameter.dtype))
                elements += parameter.numel()
            dtype = sharding.parameters[next(iter(shapes))].state.dtype
            signature = f"update({title_of(made)}, {len(shapes)} of {elements} {dtype})"
            calls.append(OpCall(signature, "update", 0.0, float(moved), dtype))
        return (*calls, *gathers_after_update(program, here))


def _num_places(program: RankProgram) -> int:
    return 1 if program.pipeline is None else program.pipeline.schedule.num_ranks


def _bytes_of(batch: Any) -> int:
    return sum(math.prod(leaf.shape) * leaf.itemsize for leaf in batch_tensors(batch))
