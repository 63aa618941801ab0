"""Stages that use an axis differently: one mesh axis along which some stages split weights and others the batch.

Placements are propagated twice along the axis, as if all stages split weights and as if all split the batch. Each call
takes the placement that its stage asks for. A value that changes its placement between two stages gets a collective, or
the slice of a value that every rank has, like any other change.
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
    """Set the role of each call: how the ranks of its stage use the axis.

    Calls that any stage repeats have no role, and count as split by weights: a view of a weight must be sharded as the
    weight is, and what depends on the whole batch alone can be sharded for nothing.
    """
    for node in graph.nodes:
        if node.op == "call_function":
            stage = info_of(node).stage
            set_info(node, stage=None, role="" if stage is None else roles[stage])


def weights_role(stages: Sequence[tuple[str, int]]) -> str:
    """The word in the plan that makes a stage split weights."""
    named = (name for name, _ in stages if axis_kind(name).cuts_weights)
    return next(named, next(kind.name for kind in axes_in_order() if kind.cuts_weights))


def _splits_rows(node: Node) -> bool:
    return bool(role := info_of(node).role) and axis_kind(role).cuts_rows


def split_by_weights(graph: Graph) -> set[str]:
    """The parameters, by placeholder name, that only stages read which split weights."""
    return {node.name for node in placeholders(graph) if _only_split(node)}


def _only_split(node: Node) -> bool:
    """Whether all readers of a value, also through calls that any stage repeats, split weights."""
    readers = [user for user in node.users if user.op == "call_function"]
    return all(not _splits_rows(user) for user in readers) and all(
        _only_split(user) for user in readers if len(tensor_inputs(user)) == 1 and not is_item(user)
    )


def propagate_by_role(
    graph: Graph,
    size: int,
    weights: Mapping[str, Placement],
    rows: Mapping[str, Placement],
    required: tuple[Placement, ...],
    origin: Mapping[str, str],
    axis: str,
) -> Propagation:
    """As `propagate`, each call by the role that its stage has. `weights` are placements of parameters; placeholders in
    `rows` are whole on every rank, and cut so by the stages that split the batch. May change the graph."""
    while True:
        known = len(graph.nodes)
        by_rows = propagate(graph, size, rows, (REPLICATE,) * len(required))
        by_weights = propagate(graph, size, weights, required, origin, axis=axis)
        if len(graph.nodes) == known:  # neither propagation has replaced a call by simpler ones
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
                strategy = whole_strategy(tuple(given), node)  # partial sums of the other propagation
            found.strategies[node], found.placements[node] = strategy, strategy.outputs
        if node in side.origin:
            found.origin[node] = side.origin[node]
        elif side is by_rows and any(not isinstance(p, Replicate) for p in found.placements.get(node, ())):
            found.origin[node] = f"stages: {info_of(node).role}"
    return found
