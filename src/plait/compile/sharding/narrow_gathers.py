"""Gathers of narrow values: a weight is sharded although a few columns of its output are needed whole.

One weight may compute the queries of many heads and the keys and values of one head (Shazeer 2019, "Fast Transformer
Decoding"). Each rank then keeps its own queries, and keys and values are gathered. Another example is a weight that is
applied to a condition: its output, such as a scale and a shift per sample (Peebles & Xie 2022, "DiT"), is much smaller
than the values that it is multiplied with.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch.fx import Graph, Node

from plait.compile.ir.calls import is_item, num_bytes, op_spec_of, output_values
from plait.compile.ir.node_info import info_of, set_info
from plait.compile.sharding.region import Grower, Region, leads_to_loss
from plait.spec.layout import Placement, Shard, divides

_MOST = 0.5  # fraction of a weight's output that may be gathered
_WIDENED = 8  # a condition is multiplied with values of at least this many times its bytes
_MAX_VALUES = 12
_MAX_WALK = 400


def with_gathers(grower: Grower, parameter: Node, seed: Shard, use: Node) -> Region | None:
    """The region of a weight that is sharded as `seed` says, with gathers of a few narrow values; None if there is
    none."""
    budget = _MOST * _bytes_of(use)
    gathered: list[Node] = []
    while (region := grower.follow(parameter, seed, use, frozenset(gathered))) is None:
        value = _narrowest(grower, use)
        if value is None or len(gathered) == _MAX_VALUES or _bytes_of(value) > budget:
            return None
        budget -= _bytes_of(value)
        gathered.append(value)
    for value in list(gathered):  # leave out gathers that are not needed
        fewer = frozenset(gathered) - {value}
        if (smaller := grower.follow(parameter, seed, use, fewer)) is not None:
            gathered.remove(value)
            region = smaller
    return region


def condition(grower: Grower, parameter: Node, seed: Shard, use: Node) -> Region | None:
    """The region of a weight whose output is a condition, which is gathered; None for any other weight."""
    if not _is_large(parameter, grower) or not _is_widened(use, grower):
        return None
    return grower.follow(parameter, seed, use, frozenset({use}))


def by_width(grower: Grower, parameter: Node, use: Node) -> Region | None:
    """The region of an embedding table that is sharded along its width, with lookups gathered; None if there is none.

    It is for a table whose number of rows the axis does not divide, and that only lookups read.
    """
    readers = [user for user in parameter.users if leads_to_loss(user)]
    shape = tuple(parameter.meta["val"].shape)
    fits = len(shape) == 2 and divides(shape, Shard(1), grower.size) and _is_large(parameter, grower)
    if not fits or any(op_spec_of(user).role != "lookup" for user in readers):
        return None
    return grower.follow(parameter, Shard(1), use, frozenset({use}))


def _is_large(parameter: Node, grower: Grower) -> bool:
    """Whether a weight is worth a gather: it has at least a quarter of the elements of the model's mean matrix."""
    sizes = [node.meta["val"].numel() for node in grower.parameters if node.meta["val"].ndim > 1]
    return bool(parameter.meta["val"].numel() * 4 * len(sizes) >= sum(sizes))


def _narrowest(grower: Grower, use: Node) -> Node | None:
    """The smallest sharded value, in bytes, between the output of a weight and the op at which the last region
    failed."""
    if grower.failed is None:
        return None
    node, region = grower.failed
    found: set[Node] = set()
    stack = [node]
    while stack:
        for source in stack.pop().all_input_nodes:
            own = source is not use and source not in grower.from_parameter
            if own and source in region.placements and source not in found | region.gathered:
                found.add(source)
                stack.append(source)
    values = [value for value in found if isinstance(value.meta.get("val"), torch.Tensor)]
    return min(values, key=lambda value: (_bytes_of(value), grower.order[value]), default=None)


def _is_widened(use: Node, grower: Grower) -> bool:
    """Whether all that is computed from a value, before the next weight, is combined with much larger values."""
    stack, seen, ends = [use], {use}, 0
    while stack:
        node = stack.pop()
        for user in node.users:
            if not leads_to_loss(user) or user in seen:
                continue
            seen.add(user)
            if grower.weighted(user) or len(seen) > _MAX_WALK:
                return False
            if is_item(user) or _bytes_of(user) < _WIDENED * _bytes_of(node):
                stack.append(user)
            else:
                ends += 1
    return ends > 0


def _bytes_of(node: Node) -> int:
    return sum(num_bytes(value) for value in output_values(node) if isinstance(value, torch.Tensor))


def mark_gathered(values: Iterable[Node], axis: str) -> None:
    """Mark sharded values to be gathered along the axis for all of their readers. Changes their `gathered`."""
    for value in values:
        set_info(value, gathered=(*info_of(value).gathered, axis))


def gathered_of(
    graph: Graph, size: int, placements: Mapping[str, Placement], among: Iterable[str] | None = None
) -> set[Node]:
    """The narrow values to gather, given the placements of parameters by placeholder name.

    `among` are the parameters, by placeholder name, whose outputs are considered; None for all.
    """
    parameters = [node for node in graph.nodes if node.op == "placeholder" and info_of(node).kind == "parameter"]
    grower = Grower(graph, size, {node: placements[node.name] for node in parameters if node.name in placements})
    asked = {node for node in parameters if among is None or node.name in set(among)}
    found: set[Node] = set()
    for use in graph.nodes:
        if (
            use.op != "call_function"
            or not leads_to_loss(use)
            or not (grower.weighted(use) or op_spec_of(use).role == "lookup")
        ):
            continue
        for source in use.all_input_nodes:
            if (parameter := grower.from_parameter.get(source)) is None:
                continue
            seed = grower.decided.get(parameter)
            if parameter not in asked or not isinstance(seed, Shard):
                continue
            region = grower.follow(parameter, seed, use)
            if region is None and op_spec_of(use).role == "lookup":
                region = by_width(grower, parameter, use) if seed.dim == 1 else None
            elif region is None:
                region = condition(grower, parameter, seed, use) or with_gathers(grower, parameter, seed, use)
            asked -= {parameter} if region is None else set(region.placements)
            if region is not None:
                found |= region.gathered
    return found
