"""Layouts of plait as shardings of jax, over a mesh of jax's devices.

Along axes that cut sequences, values of the captured graph are constrained where PyTorch's ranks would have them in
parts, and XLA's partitioner finds the shardings of all others. Other dims stay open to it
(`PartitionSpec.UNCONSTRAINED`).
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from torch.fx import Graph

from plait.compile.capture.captured import Captured
from plait.compile.ir.calls import copy_graph
from plait.compile.sharding.sequence import constrain_sequence, constrain_sums
from plait.errors import PlanError, Refusal
from plait.plan.axes import axes_in_order, batch_axes
from plait.plan.plan import Plan
from plait.plan.sharding_plan import ShardingPlan
from plait.spec.layout import Layout, Only, Placement, Shard
from plait.spec.mesh import Mesh

ALONE = "alone"  # the axis of a mesh of one device


class MeshShardings:
    """The shardings that the layouts of a plan are on jax's first devices.

    Raises PlanError if jax has no devices, fewer than the plan has ranks, or those of several processes.
    """

    def __init__(self, plan: Plan) -> None:
        self._mesh: Mesh = plan.mesh
        axes = [(name, size) for name, size in plan.mesh.axes if size > 1] or [(ALONE, 1)]
        devices = _devices(plan)
        _refuse_several_hosts(plan)
        check_devices(plan, len(devices), devices[0].platform)
        names, sizes = tuple(name for name, _ in axes), tuple(size for _, size in axes)
        self.jax_mesh = jax.make_mesh(
            sizes, names, axis_types=(AxisType.Auto,) * len(axes), devices=devices[: plan.mesh.size]
        )

    @functools.cached_property
    def whole(self) -> NamedSharding:
        """The sharding of what every device has."""
        return NamedSharding(self.jax_mesh, PartitionSpec())

    def of_layout(self, layout: Layout) -> NamedSharding:
        """The sharding of a tensor of this layout.

        An axis that does not divide its dim leaves it whole: the values are the same, and only memory is not saved.
        """
        dims: list[list[str]] = [[] for _ in layout.shape]
        sizes = list(layout.shape)
        for axis, placement in layout.placements:
            size = self._mesh.axis_size(axis)
            if isinstance(placement, Shard) and size > 1 and sizes[placement.dim] % size == 0:
                dims[placement.dim].append(axis)
                sizes[placement.dim] //= size
        return NamedSharding(self.jax_mesh, PartitionSpec(*(tuple(axes) or None for axes in dims)))

    def of_rows(self, shape: tuple[int, ...], dim: int | None, lead: int = 0) -> NamedSharding:
        """The sharding of a tensor of a batch whose rows are `dim`, behind `lead` other dims; None: it has no rows."""
        axes = [axis for axis in batch_axes() if self._mesh.axis_size(axis) > 1]
        parts = 1
        for axis in axes:
            parts *= self._mesh.axis_size(axis)
        if dim is None or not axes or shape[dim] % parts:
            return self.whole
        return NamedSharding(self.jax_mesh, PartitionSpec(*[None] * (lead + dim), tuple(axes)))


class ParameterShardings:
    """The shardings of the parameters of a plan, by name.

    held      between steps
    computed  in forward and backward
    states    in the update, with gradients and state
    kept      of gradients, until the update
    """

    def __init__(self, plan: ShardingPlan, shardings: MeshShardings) -> None:
        of, parameters = shardings.of_layout, plan.parameters
        self.held = {name: of(each.held) for name, each in parameters.items()}
        self.computed = {name: of(each.compute) for name, each in parameters.items()}
        self.states = {name: of(each.state) for name, each in parameters.items()}
        self.kept = self.states if plan.sums_each_microbatch else self.computed


def refuse_layouts(layouts: Mapping[str, Layout]) -> None:
    """Raise PlanError for a parameter that is on some ranks only."""
    for name, layout in layouts.items():
        for axis, placement in layout.placements:
            if isinstance(placement, Only):
                what = f"the layout {layout} puts {name} on one rank of {axis}, and XLA's shardings have all devices"
                raise PlanError(Refusal(what, "", "leave the annotation out, or leave backend=xla out"))


def _devices(plan: Plan) -> list[jax.Device]:
    try:
        return jax.devices()
    except RuntimeError as error:  # of the platform that JAX_PLATFORMS names, or of a driver
        what = f"the plan {plan.title!r} runs on the devices of jax, which finds none"
        named = os.environ.get("JAX_PLATFORMS")
        instead = f"change JAX_PLATFORMS={named}, or leave it out" if named else "set JAX_PLATFORMS=cpu to try it out"
        refusal = Refusal(what, str(error).rstrip("."), f"{instead}, or leave backend=xla out")
        raise PlanError(refusal) from error


def _refuse_several_hosts(plan: Plan) -> None:
    if (num := jax.process_count()) > 1:
        what = f"the plan {plan.title!r} has the devices of one process, and jax has joined {num}"
        raise PlanError(Refusal(what, "", "leave jax.distributed.initialize() out and take the devices of one host"))


def check_devices(plan: Plan, num: int, platform: str) -> None:
    """Raise PlanError if there are fewer than the plan's ranks."""
    need = plan.mesh.size
    if num >= need:
        return
    instead = f"give a plan for {num}"
    if platform == "cpu":
        instead += (
            f", or, to try it out, start Python with XLA_FLAGS=--xla_force_host_platform_device_count={need}, which"
            " makes that many virtual devices of a CPU"
        )
    what = f"the plan {plan.title!r} is for {need} devices, and jax has {num} ({platform})"
    raise PlanError(Refusal(what, "", instead))


Constrained = dict[str, NamedSharding]


def constrained(
    captured: Captured, plan: Plan, parameters: ShardingPlan, shardings: MeshShardings
) -> tuple[Graph, Constrained]:
    """A copy of the captured graph with calls of `comm_ops.constrain`, and the sharding of each by its name.

    Args:
        captured: a step on global shapes.
        plan: which axes cut sequences.
        parameters: the layouts of the parameters; where a sum over an axis that splits weights becomes a
            reduce-scatter depends on them.
        shardings: the mesh.
    """
    graph, found = copy_graph(captured.graph), Constrained()
    nodes = {one.name: one.node for one in captured.inputs}
    dims = {nodes[name]: dim for name, dim in captured.sequence_dims.items()}
    for kind in axes_in_order():
        axis, size = kind.name, plan.mesh.axis_size(kind.name)
        if size == 1:
            continue
        cuts: dict[str, Placement] = {}
        if kind.cuts_weights and plan.sequence == "yes":
            layouts = parameters.parameters
            fixed = {nodes[name]: each.compute.on(axis) for name, each in layouts.items() if name in nodes}
            cuts = constrain_sums(graph, dims, size, fixed, axis)
        elif kind.cuts_sequence:
            cuts = constrain_sequence(graph, dims, size)
        for name, part in cuts.items():
            if isinstance(part, Shard):
                spec = [PartitionSpec.UNCONSTRAINED] * part.dim + [axis]
                rest = len(_shape(graph, name)) - len(spec)
                spec += [PartitionSpec.UNCONSTRAINED] * rest
                found[name] = NamedSharding(shardings.jax_mesh, PartitionSpec(*spec))
    return graph, found


def _shape(graph: Graph, name: str) -> tuple[int, ...]:
    return next(tuple(node.meta["val"].shape) for node in graph.nodes if node.name == name)
