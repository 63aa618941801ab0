"""simulate: predicts what a training step takes under a plan on a cluster. Nothing is run."""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from plait.api.deep_models import DEEP, deep_program, equal_layers, with_fewer
from plait.api.memory import Estimator
from plait.backends.eager.passes import eager_graphs
from plait.compile.capture.batch import batch_tensors
from plait.compile.capture.capture import LossFn
from plait.compile.ir.dtypes import dtype_named
from plait.compile.rank_program import RankProgram
from plait.compile.step_calls import gathers_after_update, step_program
from plait.cost.collective_time import CollectiveKind, collective_time
from plait.cost.step_program import AxisCollective, CollectiveCall, OpCall, ProgramCall, StepProgram, moved_by
from plait.cost.step_simulation import StepSimulator, check_ranks
from plait.engine.arguments import check_arguments
from plait.engine.local_batch import batch_of_replica, num_rows, num_tokens
from plait.engine.local_sgd.replicas import bytes_sent
from plait.engine.local_tensors import summed_square_axes
from plait.engine.optimizer_step import StateEstimate
from plait.engine.rank_optimizers import OptimizerFactory, make_optimizer
from plait.engine.setup_checks import check_given, check_plan
from plait.errors import BatchError, PlanError, Refusal
from plait.optim.combined import each_parameter, title_of
from plait.plan.annotation import Annotations
from plait.plan.axes import stage_axis
from plait.plan.plan import Plan
from plait.report.memory_table import MemoryEstimate
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
    clip_norm: float | None = None,
    memory: bool = True,
) -> StepPrediction:
    """Predict what a step on a global batch takes under a plan on a cluster.

    The step is captured and lowered as the Trainer would, one rank for each place of the pipeline, and the calls of its
    graphs are simulated on the cluster: products, memory traffic, collectives by group, overlap, update. Replicas that
    agree later are simulated as one, with their exchanges spread over steps; where intervals grow (`sync=4..64`) at the
    longest.

    Args:
        model: the model, which may be on the meta device; its values are not read.
        loss_fn: as the Trainer takes it.
        batch: a global batch, which may be on the meta device.
        plan: a Plan or its text.
        cluster: a Cluster, or what `plait cluster show` takes: a name such as "h100x64", or a TOML file.
        optimizer: as the Trainer takes it.
        layouts: annotations of parameters by name pattern.
        clip_norm: as the Trainer takes it.
        memory: whether to predict the memory of each rank too, which takes as long again. It is not predicted of models
            with more than 16 equal layers, of which only a few are lowered.

    Raises PlanError, LayoutError or CaptureError as the Trainer would; PlanError for a plan with parameter servers,
    and for more ranks than the cluster has devices; ConfigError for a cluster that is not known.
    """
    simulator = Simulator(model, loss_fn, batch, cluster, optimizer=optimizer, layouts=layouts, clip_norm=clip_norm)
    return simulator.simulate(Plan.of(plan), memory)


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
        clip_norm: float | None = None,
    ) -> None:
        check_given(model, loss_fn, optimizer, clip_norm)
        check_arguments(cluster=cluster, layouts=layouts)
        self.cluster = cluster if isinstance(cluster, Cluster) else find_cluster(cluster)
        if not num_rows(batch):
            raise BatchError("the batch has no rows: there is nothing to train on; give one with a row or more")
        self._model = model
        self._given = (loss_fn, batch, optimizer, layouts, built)
        self._estimators: dict[int, Estimator] = {}  # by the number of equal layers that are lowered; 0 for all
        self._replica: dict[int, Simulator] = {}  # of a replica that agrees later, by its rows
        self._layers = equal_layers(model)
        self._batch = batch
        self._optimizer = optimizer
        self._clip_norm = clip_norm
        self._steps = StepSimulator(self.cluster)

    def simulate(self, plan: Plan, memory: bool = True) -> StepPrediction:
        """What a step of the plan takes."""
        if plan.workers:
            why, inner = "its workers push and pull at times of their own", str(plan.inner_plan)
            raise PlanError(Refusal(f"the plan {plan.title!r}", why, f"simulate the plan of one of them, {inner!r}"))
        check_ranks(plan.mesh, self.cluster)
        if plan.relaxed_axis:
            return self._replicas(plan, memory)
        deep = self._deep(plan)
        program = deep or self.program(plan)
        found = self._steps.simulate(program)
        estimate = self._estimator(0).estimate(plan) if memory and deep is None else None
        return StepPrediction(plan, self.cluster, program, found, estimate)

    def _replicas(self, plan: Plan, memory: bool) -> StepPrediction:
        """A step of a plan whose replicas agree later: that of a replica, and a part of what they exchange."""
        one, inner, axis = self._of_one(plan), plan.inner_plan, plan.relaxed_axis
        deep, lowered = one._deep(inner), one.lowered(inner)
        program = replace(deep or one.program(inner), mesh=plan.mesh)  # where ranks lie among those of all replicas
        found = self._steps.simulate(program)
        num, stride = plan.mesh.axis_size(axis), plan.mesh.stride(axis)
        places = range(_num_places(lowered))
        sent = max(bytes_sent(plan, lowered.sharding, _coordinates(lowered, place)) for place in places)
        whole, group = sent * num / (2 * (num - 1)), range(0, num * stride, stride)  # an all-reduce sends as much
        steps = plan.sync if isinstance(plan.sync, int) else plan.sync[1]
        exchange = collective_time(CollectiveKind.ALL_REDUCE, whole, group, self.cluster) / plan.streaming
        waits = max(exchange - plan.overlap * found.seconds, 0.0) * plan.streaming / steps
        level = self.cluster.links[self.cluster.between(group[0], group[-1])].level
        estimate = self.memory(plan) if memory and deep is None else None
        return StepPrediction(plan, self.cluster, program, found, estimate, num, waits, {level: sent / steps})

    def _of_one(self, plan: Plan) -> Simulator:
        """The simulator of a replica, which has a part of the batch."""
        loss_fn, whole, optimizer, layouts, built = self._given
        batch = batch_of_replica(whole, plan)
        if (rows := num_rows(batch)) not in self._replica:
            self._replica[rows] = Simulator(
                self._model, loss_fn, batch, self.cluster, optimizer=optimizer, layouts=layouts, built=built,
                clip_norm=self._clip_norm,
            )  # fmt: skip
        return self._replica[rows]

    def memory(self, plan: Plan) -> MemoryEstimate:
        """The memory of each rank of the plan."""
        return self._estimator(0).estimate(plan)

    def lowered(self, plan: Plan) -> RankProgram:
        """What ranks of the plan run, of a model that is lowered as a whole."""
        return self._estimator(0).program(plan)

    def program(self, plan: Plan) -> StepProgram:
        """What the ranks of the plan issue in a step, of a model that is lowered as a whole."""
        return self._described(0, plan)

    def _deep(self, plan: Plan) -> StepProgram | None:
        """The program of a model of many equal layers, of which few are lowered; None for others."""
        layers = self._layers
        if layers is None or layers.number <= DEEP:
            return None
        check_plan(plan, self._model, self._clip_norm)
        return deep_program(layers, plan, self._described)

    def _described(self, number: int, plan: Plan) -> StepProgram:
        program = self._estimator(number).program(plan)
        return describe_program(program, self._batch, self._optimizer, self._clip_norm is not None)

    def _estimator(self, number: int) -> Estimator:
        if number not in self._estimators:
            model = self._model
            if number and self._layers is not None:
                model = with_fewer(model, self._layers, number)
            self._estimators[number] = Estimator(model, *self._given)
        return self._estimators[number]


def describe_program(
    program: RankProgram, batch: Any, optimizer: OptimizerFactory = _ADAMW, clips: bool = False
) -> StepProgram:
    """What the ranks of a compiled program issue in a step on a global batch, and in the update, which `clips` the
    gradients to a norm."""
    plan = program.plan
    return step_program(
        program,
        eager_graphs(program),
        num_rows(batch),
        num_tokens(batch),
        tuple(_update(program, place, optimizer, clips) for place in range(_num_places(program))),
        _bytes_of(batch_of_replica(batch, plan)) // plan.num_batch_parts,
    )


def local_shapes(program: RankProgram, place: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of what a rank at this place of the pipeline updates, by the name of the parameter."""
    here = _coordinates(program, place)
    trained = {output.name for output in program.captured.outputs if output.kind == "gradient"}
    return {
        name: (each.state.local_shape(program.plan.mesh, here), dtype_named(each.state.dtype))
        for name, each in program.sharding.parameters.items()
        if name in trained and each.state.lies_at(here)
    }


def update_call(program: RankProgram, place: int, optimizer: OptimizerFactory) -> OpCall | None:
    """The update of the parameters of a rank at this place, as one call; None if it has none."""
    shapes = local_shapes(program, place)
    if not shapes:
        return None
    twins = {n: nn.Parameter(torch.empty(s, dtype=d, device="meta")) for n, (s, d) in shapes.items()}
    made = make_optimizer(optimizer, list(twins.items()))
    estimate = StateEstimate(made)
    moved = elements = 0
    for group, parameter in each_parameter(made):
        # Parameters and state are read and written, gradients read.
        moved += 3 * parameter.numel() * parameter.itemsize
        moved += 2 * sum(estimate.state_bytes(group, tuple(parameter.shape), parameter.dtype))
        elements += parameter.numel()
    dtype = program.sharding.parameters[next(iter(shapes))].state.dtype
    signature = f"update({title_of(made)}, {len(shapes)} of {elements} {dtype})"
    return OpCall(signature, "update", 0.0, float(moved), dtype, parameters=len(shapes))


def _update(program: RankProgram, place: int, optimizer: OptimizerFactory, clips: bool) -> tuple[ProgramCall, ...]:
    """The calls of an update on a rank at this place, and of what follows it."""
    own = update_call(program, place, optimizer)
    gathers = gathers_after_update(program, _coordinates(program, place))
    if own is None:
        return tuple(gathers)
    before = (*_clip(program, place), own) if clips else (own,)
    sums = _sums_of_squares(program) if clips else ()
    return (*before, *sums, *moved_by(gathers, len(before) + len(sums)))


def _clip(program: RankProgram, place: int) -> tuple[OpCall, ...]:
    """Clipping the gradients of a rank at this place, as calls: they are read for their norm, then read and written."""
    shapes = local_shapes(program, place)
    size = sum(math.prod(shape) * dtype.itemsize for shape, dtype in shapes.values())
    dtype = program.sharding.parameters[next(iter(shapes))].state.dtype
    named = f"{len(shapes)} gradients of {size} bytes"
    return tuple(
        OpCall(f"{what}({named})", "update", 0.0, float(times * size), dtype)
        for what, times in (("norms", 1), ("clip", 2))
    )


def _sums_of_squares(program: RankProgram) -> tuple[CollectiveCall, ...]:
    """The sums over ranks that make the norm of all gradients from those of parts."""
    trained = {output.name for output in program.captured.outputs if output.kind == "gradient"}
    layouts = {name: each.state for name, each in program.sharding.parameters.items() if name in trained}
    return tuple(
        CollectiveCall(f"squares summed over {axis}", "update", (AxisCollective(CollectiveKind.ALL_REDUCE, axis, 8),),
                       stream=axis, what="norm of gradients")
        for group in sorted(set(summed_square_axes(layouts).values())) for axis in group
    )  # fmt: skip


def _coordinates(program: RankProgram, place: int) -> dict[str, int]:
    here = dict.fromkeys(program.plan.mesh.names, 0)
    return here | ({stage_axis(): place} if program.pipeline is not None else {})


def _num_places(program: RankProgram) -> int:
    return 1 if program.pipeline is None else program.pipeline.schedule.num_ranks


def _bytes_of(batch: Any) -> int:
    return sum(math.prod(leaf.shape) * leaf.itemsize for leaf in batch_tensors(batch))
