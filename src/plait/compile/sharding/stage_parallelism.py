"""Parallelism by stage: a mesh axis over which some stages of a pipeline split weights and others split the batch.

Placements are propagated twice: as if all stages split weights, and as if all split the batch. Each call takes the
placement of the way in which its stage uses the axis. A value whose placement changes between two stages is converted
as after any other change, by a collective or a slice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch.fx import Graph, Node

from plait.compile.ir.calls import is_item, placeholders, tensor_inputs
from plait.compile.ir.node_info import info_of, set_info
from plait.compile.sharding.propagate import Propagation, propagate, whole_strategy
from plait.plan.axes import axes_in_order, axis_kind
from plait.spec.layout import REPLICATE, Partial, Placement, Replicate


def give_roles(graph: Graph, roles: Sequence[str]) -> None:
    """Set the `role` of each call to the way in which its stage uses the axis. Changes `graph`.

    Args:
        roles: for each stage, the name of the axis kind, such as data or tensor.

    Calls that each stage repeats have no role, and count as splitting weights: a view of a weight is sharded as the
    weight is, and sharding a call on the batch alone costs nothing.
    """
    for node in graph.nodes:
        if node.op == "call_function":
            stage = info_of(node).stage
            set_info(node, stage=None, role="" if stage is None else roles[stage])


def weights_role(stages: Sequence[tuple[str, int]]) -> str:
    """The name in `stages=` of the axis kind that splits weights."""
    named = (name for name, _ in stages if axis_kind(name).cuts_weights)
    return next(named, next(kind.name for kind in axes_in_order() if kind.cuts_weights))


def _splits_rows(node: Node) -> bool:
    return bool(role := info_of(node).role) and axis_kind(role).cuts_rows


def split_by_weights(graph: Graph) -> set[str]:
    """The parameters, by placeholder name, that are read only by stages that split weights."""
    return {node.name for node in placeholders(graph) if _only_split(node)}


def _only_split(node: Node) -> bool:
    """Whether all readers of a value split weights, also those behind views and other calls on it alone."""
    readers = [user for user in node.users if user.op == "call_function"]
    return all(not _splits_rows(user) for user in readers) and all(
        _only_split(user) for user in readers if len(tensor_inputs(user)) == 1 and not is_item(user)
    )


def propagate_stage_parallelism(
    graph: Graph,
    size: int,
    weights: Mapping[str, Placement],
    rows: Mapping[str, Placement],
    required: tuple[Placement, ...],
    origin: Mapping[str, str],
    axis: str,
) -> Propagation:
    """Propagate placements along an axis that stages use differently. May change `graph`.

    Args:
        size: the number of ranks of the axis.
        weights: placements of parameters by node name, for stages that split weights.
        rows: placements of batch leaves by node name, for stages that split the batch. Every rank has the leaves whole.
        required: the placement of each output of the graph.
        origin: the annotations or searches that `weights` comes from, by node name.
    """
    while True:
        known = len(graph.nodes)
        by_rows = propagate(graph, size, rows, (REPLICATE,) * len(required))
        by_weights = propagate(graph, size, weights, required, origin, axis=axis)
        if len(graph.nodes) == known:  # no propagation has replaced a call by simpler ones
            break
    found = Propagation(graph, size, required=required)
    found.without_rule = by_rows.without_rule | by_weights.without_rule
    for node in graph.nodes:
        side = by_rows if _splits_rows(node) else by_weights
        if node.op == "placeholder":
            found.placements[node] = by_weights.placements[node]
        elif node.op == "call_function" and not is_item(node):
            inputs = tensor_inputs(node)
            strategy = side.strategies[node]
            given = [found.placement(i) for i in inputs]
            if any(isinstance(w, Partial) and w != have for have, w in zip(given, strategy.inputs, strict=True)):
                strategy = whole_strategy(tuple(given), node)  # the input is a partial sum in one propagation only
            found.strategies[node], found.placements[node] = strategy, strategy.outputs
        if node in side.origin:
            found.origin[node] = side.origin[node]
        elif side is by_rows and any(not isinstance(p, Replicate) for p in found.placements.get(node, ())):
            found.origin[node] = f"stages: {info_of(node).role}"
    return found
