"""Shardings of activations over the axes of a mesh that cut sequences.

Values of the captured graph are constrained where PyTorch's ranks would have them in parts, and XLA's partitioner finds
the shardings of all others. Other dims stay open to it (`PartitionSpec.UNCONSTRAINED`).
"""

from __future__ import annotations

from jax.sharding import NamedSharding, PartitionSpec
from torch.fx import Graph

from plait.backends.xla.mesh_shardings import MeshShardings
from plait.compile.capture.captured import Captured
from plait.compile.ir.calls import copy_graph
from plait.compile.sharding.sequence import constrain_sequence, constrain_sums
from plait.plan.axes import axes_in_order
from plait.plan.plan import Plan
from plait.plan.sharding_plan import ShardingPlan
from plait.spec.layout import Placement, Shard

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
