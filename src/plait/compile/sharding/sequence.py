"""The sequence of a batch is cut over an axis: each rank has a part of the positions of every row.

Every tensor with a sequence is constrained to its part (as by JAX's with_sharding_constraint), and the layouts of all
that is computed from it follow by propagation. A tensor with a position more than the axis divides, from which inputs
and targets are taken by slices, is constrained where the slices are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from types import FunctionType

import torch
from torch.fx import Graph, Node

from plait.compile.ir.calls import (
    call_of,
    copy_graph,
    is_item,
    is_view,
    num_bytes,
    op_spec_of,
    output_node,
    placeholders,
    settled,
    tensor_inputs,
)
from plait.compile.ir.node_info import describe, info_of, is_forward
from plait.compile.ops import Call, comm_ops
from plait.compile.ops.context_attention import attends_causally, attention_kind
from plait.compile.sharding.propagate import Propagation, only_leaves, propagate
from plait.spec.layout import REPLICATE, Partial, Placement, Shard, divides


def constrain_sequence(
    graph: Graph, dims: Mapping[str, int], size: int, blocks: int | None = 1
) -> dict[str, Placement]:
    """Constrain the tensors of the batch to parts of their sequences. Changes the graph.

    Args:
        dims: the dim of the sequence, by placeholder name.
        size: the number of ranks of the axis.
        blocks: as in Shard; None if a rank has every n-th position.

    Returns:
        The placement of each call that constrains a value, by its name, for `propagate`.
    """
    fixed: dict[str, Placement] = {}
    for leaf in placeholders(graph):
        if leaf.name in dims:
            for value, part in _divisible(leaf, dims[leaf.name], size, blocks):
                fixed[_constrain(graph, value)] = part
    for leaf in (each for each in placeholders(graph) if each.name in dims):
        part = _part(leaf, dims[leaf.name], size, blocks)
        if divides(tuple(leaf.meta["val"].shape), part, size):
            fixed.update((_constrain(graph, value), part) for value in _looked_up(leaf))
    return fixed


def what_is_cut(graph: Graph, cuts: Mapping[str, Placement]) -> dict[str, str]:
    """What is cut of each tensor of the batch, in words, by placeholder name; nothing of those that stay whole."""
    found: dict[str, str] = {}
    for node in graph.nodes:
        if isinstance(part := cuts.get(node.name), Shard):
            leaf, num = node, node.meta["val"].shape[part.dim]
            while inputs := tensor_inputs(leaf):
                leaf = inputs[0]
            if leaf.op == "placeholder":
                found.setdefault(leaf.name, f"{num} positions")
    return found


def attention_calls(graph: Graph) -> list[Call]:
    """The calls of fused attention."""
    return [call_of(node) for node in graph.nodes if op_spec_of(node).role == "attention"]


def needs_stripes(calls: Iterable[Call], size: int, kind: str) -> bool:
    """Whether each rank should have every n-th position: the ranks of a ring with a contiguous part each would compute
    unequal parts of a causal attention."""
    return any(attends_causally(call) and attention_kind(call, size, kind) == "ring" for call in calls)


def constrain_sums(
    graph: Graph, dims: Mapping[str, int], size: int, fixed: Mapping[str, Placement], axis: str
) -> dict[str, Placement]:
    """Constrain the activations that are summed over an axis that splits weights to parts of the sequence, so that each
    sum is a reduce-scatter (Korthikanti et al. 2022, "Reducing Activation Recomputation"). Changes the graph.

    Args:
        dims: as of `constrain_sequence`.
        fixed: the placements of parameters by placeholder name.

    Returns:
        The placement of each call that constrains a value, by its name, for `propagate`.
    """
    _inputs_before_weights(graph)
    whole, cut = copy_graph(graph), copy_graph(graph)
    results = (REPLICATE,) * len(output_node(graph).args[0])  # type: ignore[arg-type]
    summed = propagate(whole, size, fixed, results, axis=axis)
    parts = propagate(cut, size, constrain_sequence(cut, dims, size), results, keeps_sequence=True)
    homes = {node.name: parts.placement(node) for node in cut.nodes if node.op == "call_function" and _is_tensor(node)}
    sums = [node for node in whole.nodes if node.op == "call_function" and _is_summed(node, summed)]
    names = dict.fromkeys(_first_sum(node, summed).name for node in sums)
    nodes = {node.name: node for node in graph.nodes}
    gathers = _smaller_sources(graph, [node.name for node in summed.strategies if _splits_weights(node, summed)], homes)
    gathered: dict[str, Placement] = {_constrain(graph, value, reader): REPLICATE for value, reader in gathers}
    return gathered | {
        _constrain(graph, nodes[name]): home
        for name in names
        if name in nodes and isinstance(home := homes.get(name, REPLICATE), Shard)
    }


def _splits_weights(node: Node, found: Propagation) -> bool:
    """Whether the node multiplies whole values with parts of weights."""
    return _multiplies(node) and len({isinstance(want, Shard) for want in found.strategies[node].inputs}) == 2


def _smaller_sources(
    graph: Graph, products: Iterable[str], homes: Mapping[str, Placement]
) -> dict[tuple[Node, Node], None]:
    """Where to gather what these products read whole and is cut at home, if not before them: each value with its one
    reader from which on it is whole. A token that is repeated for each of its experts is gathered once."""
    found: dict[tuple[Node, Node], None] = {}
    nodes = {node.name: node for node in graph.nodes}
    for value in (each for name in products if name in nodes for each in tensor_inputs(nodes[name])):
        node, least = value, num_bytes(value.meta["val"])
        best, beside = list[tuple[Node, Node]](), list[tuple[Node, Node]]()
        while isinstance(homes.get(node.name), Shard) and (sources := tensor_inputs(node)):
            largest = max(sources, key=lambda each: num_bytes(each.meta["val"]))
            if op_spec_of(node).weighted or (sources.index(largest),) not in op_spec_of(node).linear(call_of(node)):
                break
            beside += [(each, node) for each in sources if each is not largest]
            gathered = [(largest, node), *beside]
            if (size := sum(num_bytes(each.meta["val"]) for each, _ in gathered)) < least:
                least, best = size, gathered
            node = largest
        found |= dict.fromkeys(best)
    return found


def _inputs_before_weights(graph: Graph) -> None:
    """Move each product that gives the gradient of an input before that of the weight, which reads the same gradient.

    The first of the two decides how it is read, and that of the weight could do with a part of the positions. Changes
    the graph."""
    place = {node: number for number, node in enumerate(graph.nodes)}
    for node in list(graph.nodes):
        if is_forward(node) or not _multiplies(node) or not only_leaves(node):
            continue
        for gradient in (_viewed(each) for each in tensor_inputs(node)):
            for other in list(gradient.users):
                later = _multiplies(other) and place[other] > place[node] and not only_leaves(other)
                if later and all(place[source] < place[node] for source in other.all_input_nodes):
                    node.prepend(other)


def _viewed(node: Node) -> Node:
    """What a node is a view of; the node itself if it is none, or made of numbers."""
    return next(iter(tensor_inputs(node)), node) if is_view(node) else node


def _multiplies(node: Node) -> bool:
    return node.op == "call_function" and bool(op_spec_of(node).weighted) and _is_tensor(node)


def whole_attention(found: Propagation) -> list[str]:
    """The modules with attention, if none of it is computed on parts of the sequence; else nothing."""
    nodes = [node for node in found.strategies if is_forward(node) and op_spec_of(node).role == "attention"]
    if any(found.strategies[node].sends for node in nodes):
        return []
    return list(dict.fromkeys(info_of(node).module or "the loss" for node in nodes))


def whole_sequences(found: Propagation) -> list[str]:
    """The ops that need the whole sequence of an input, with their modules, the largest inputs first."""
    sizes: dict[str, int] = {}
    for node, strategy in found.strategies.items():
        for source, want in zip(tensor_inputs(node), strategy.inputs, strict=True):
            if isinstance(found.placement(source), Shard) and want == REPLICATE:
                op = node.target.__name__ if isinstance(node.target, FunctionType) else node.target
                name = f"{op} in {info_of(node).module or 'the loss'}"
                sizes[name] = max(sizes.get(name, 0), num_bytes(source.meta["val"]))
    return sorted(sizes, key=lambda name: -sizes[name])


def _constrain(graph: Graph, value: Node, reader: Node | None = None) -> str:
    """Put a call between a value and its readers, or one of them. Returns its name."""
    with graph.inserting_before(settled(value).next if reader is None else reader):
        made = graph.call_function(comm_ops.constrain, (value,))
    describe(made, info_of(value if reader is None else reader), value.meta["val"])
    value.replace_all_uses_with(made, lambda user: user is not made and reader in (None, user))
    return made.name


def _is_tensor(node: Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def _is_summed(node: Node, found: Propagation) -> bool:
    """Whether terms of a product with a weight, or of a lookup, are summed over the axis after this node."""
    if not _is_tensor(node) or not isinstance(found.placement(node), Partial):
        return False
    readers = [user for user in node.users if user in found.strategies]
    wanted = [found.strategies[user].inputs[tensor_inputs(user).index(node)] for user in readers]
    return REPLICATE in wanted and _is_product(node, found)


def _first_sum(node: Node, found: Propagation) -> Node:
    """The smallest value that may be summed in place of `node`, the first of several: before views, and factors such as
    those of dropout, but after the sum of what a token's experts give."""
    least = node
    while len(terms := [i for i in tensor_inputs(node) if isinstance(found.placement(i), Partial)]) == 1:
        (node,) = terms
        if num_bytes(node.meta["val"]) <= num_bytes(least.meta["val"]):
            least = node
    return least


def _is_product(node: Node, found: Propagation) -> bool:
    """Whether the terms of a sum are those of a product with a weight or of a lookup."""
    terms = [i for i in tensor_inputs(node) if isinstance(found.placement(i), Partial)]
    if terms:
        return all(_is_product(term, found) for term in terms)
    maker: Node = node.args[0] if is_item(node) else node  # type: ignore[assignment]
    row = op_spec_of(maker)
    return row.weighted or row.role == "lookup"


def _divisible(leaf: Node, dim: int, size: int, blocks: int | None) -> Iterator[tuple[Node, Shard]]:
    """The leaf if its sequence can be cut, or else the slices of it that can, each with its part."""
    shape = tuple(leaf.meta["val"].shape)
    part = _part(leaf, dim, size, blocks)
    if divides(shape, part, size):
        yield leaf, part
        return
    for user in list(leaf.users):
        if op_spec_of(user).view is not None and not is_item(user) and (after := _dim_after(user, dim)) is not None:
            yield from _divisible(user, after, size, blocks)


def _part(leaf: Node, dim: int, size: int, blocks: int | None) -> Shard:
    return Shard(dim, max(leaf.meta["val"].shape[dim] // size, 1) if blocks is None else blocks)


def _looked_up(leaf: Node) -> list[Node]:
    """Integers of the shape of a tensor of the batch that are computed from it, and by which rows of a table are looked
    up: the inputs of a decoder, which are the labels one position later. Their shift mixes positions."""
    found: dict[Node, None] = {}
    seen, queue = {leaf}, [leaf]
    for node in queue:
        for user in node.users:
            if op_spec_of(user).role == "lookup" and node.meta["val"].shape == leaf.meta["val"].shape:
                if node is not leaf and node.target is not comm_ops.constrain:
                    found[node] = None
            elif user not in seen and _is_tensor(user) and not user.meta["val"].dtype.is_floating_point:
                seen.add(user)
                queue.append(user)
    return list(found)


def _dim_after(view: Node, dim: int) -> int | None:
    """The dim of a view that holds the positions along a dim of its input, or some of these; None if none does."""
    call = call_of(view)
    for factor in op_spec_of(view).factors(call):
        if factor.inputs[0] == dim:
            return factor.outputs[0]
    before, after = (list(spec.shape) if spec else [] for spec in (call.inputs[0], call.outputs[0]))
    slices = len(before) == len(after) and before[:dim] + before[dim + 1 :] == after[:dim] + after[dim + 1 :]
    return dim if slices else None
