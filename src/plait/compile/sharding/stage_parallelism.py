"""Stages that are spread differently: one mesh axis along which some stages split weights and others the batch.

The step is laid out twice along the axis, as if all stages split weights and as if all split the batch, and each call
is taken from the one that its stage asks for. What changes its layout between two stages becomes a collective, or the
slice of what every rank has, like any other change.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from torch.fx import Graph, Node

from plait.compile.ir.calls import is_item, placeholders, tensor_inputs
from plait.compile.ir.node_info import info_of, set_info
from plait.compile.sharding.propagate import Propagation, propagate, whole_strategy
from plait.spec.layout import REPLICATE, Partial, Placement, Replicate, Shard

INNER = "inner"  # the axis of the ranks of one stage
_TENSOR, _DATA = "tensor", "data"


def give_roles(graph: Graph, roles: Sequence[str]) -> None:
    """Keep with each call what its stage is; of what any stage repeats, that it splits weights: a view of a weight must
    lie as the weight does, and what comes from the whole batch alone can be cut for nothing."""
    for node in graph.nodes:
        if node.op == "call_function":
            stage = info_of(node).stage
            set_info(node, stage=None, role=_TENSOR if stage is None else roles[stage])


def split_by_tensor(graph: Graph) -> set[str]:
    """Parameters, by placeholder name, that only stages read which split weights."""
    return {node.name for node in placeholders(graph) if _only_split(node)}


def _only_split(node: Node) -> bool:
    """Whether all that reads a value, also through what any stage repeats, splits weights."""
    readers = [user for user in node.users if user.op == "call_function"]
    return all(info_of(user).role == _TENSOR for user in readers) and all(
        _only_split(user) for user in readers if len(tensor_inputs(user)) == 1 and not is_item(user)
    )


def propagate_by_role(
    graph: Graph,
    size: int,
    weights: Mapping[str, Placement],
    batch: Collection[str],
    required: tuple[Placement, ...],
    origin: Mapping[str, str],
) -> Propagation:
    """As `propagate`, each call by the role that its stage has. `weights` are placements of parameters; placeholders in
    `batch` are whole on every rank, and cut by the stages that split the batch. May change the graph."""
    rows: dict[str, Placement] = {name: Shard(0) for name in batch}
    while True:
        known = len(graph.nodes)
        by_rows = propagate(graph, size, rows, (REPLICATE,) * len(required))
        by_weights = propagate(graph, size, weights, required, origin, axis=INNER)
        if len(graph.nodes) == known:  # neither has replaced a call by simpler ones
            break
    found = Propagation(graph, size, required=required)
    found.without_rule = by_rows.without_rule | by_weights.without_rule
    for node in graph.nodes:
        side = by_rows if info_of(node).role == _DATA else by_weights
        if node.op == "placeholder":
            found.placements[node] = by_weights.placements[node]
        elif node.op == "call_function" and not is_item(node):
            inputs = tensor_inputs(node)
            strategy = side.strategies[node]
            given = [found.placement(i) for i in inputs]
            if any(isinstance(w, Partial) and w != have for have, w in zip(given, strategy.inputs, strict=True)):
                strategy = whole_strategy(tuple(given), node)  # terms that the other layout would have had
            found.strategies[node], found.placements[node] = strategy, strategy.outputs
        if node in side.origin:
            found.origin[node] = side.origin[node]
        elif side is by_rows and any(not isinstance(p, Replicate) for p in found.placements.get(node, ())):
            found.origin[node] = "stages: data"
    return found
