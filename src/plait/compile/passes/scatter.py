"""Gradients of which a rank keeps a part: reduce-scattered, not all-reduced (Rajbhandari et al. 2020, "ZeRO")."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch.fx import Graph, Node

from plait.compile.ir.calls import output_node
from plait.compile.ir.node_info import describe, info_of
from plait.compile.ops import comm_ops
from plait.compile.sharding.flat_shards import Cut


def scatter_gradients(graph: Graph, cuts: Mapping[int, Cut], axis: str) -> Graph:
    """Let this rank give its part along `axis` of the outputs in `cuts`. Changes `graph` and returns it.

    A sum over the axis that only leaves the graph becomes a reduce-scatter, before the sums over other axes, which are
    then of the parts. Of what every rank has whole, it takes its part.
    """
    end = output_node(graph)
    results = list(end.args[0])  # type: ignore[arg-type]
    replaced: list[Node] = []
    for index, cut in cuts.items():
        if isinstance(result := results[index], Node):
            sums = sums_before(result, end)
            summed_over = [str(one.args[1]) for one in sums]
            if axis in summed_over:
                others = [other for other in summed_over if other != axis]
                results[index] = _scattered(graph, sums, axis, others, cut)
                replaced += sums[::-1]
            else:
                with graph.inserting_before(end):
                    results[index] = graph.call_function(comm_ops.take_part, (result, axis, cut.plain))
                describe(results[index], info_of(result), result.meta["val"].new_empty(cut.part_shape(0)))
    end.args = (tuple(results),)
    for node in replaced:
        if not node.users:  # two outputs may be one sum
            graph.erase_node(node)
    return graph


def sums_before(result: Any, reader: Node) -> list[Node]:
    """The sums over ranks that only make what `reader` takes, the first one first."""
    found: list[Node] = []
    while isinstance(result, Node) and is_sum(result) and set(result.users) == {reader}:
        found.append(result)
        result, reader = result.args[0], result
    return found[::-1]


def is_sum(node: Node) -> bool:
    return node.target is comm_ops.all_reduce and node.args[2] == "sum"


def gives_part(node: Node) -> bool:
    """Whether a call gives this rank its part, of a sum or of a tensor."""
    return node.target in (comm_ops.scatter_part, comm_ops.take_part)


def _scattered(graph: Graph, sums: Sequence[Node], axis: str, others: Sequence[str], cut: Cut) -> Node:
    """The same sums, of which each rank has its part."""
    term, last = sums[0].args[0], sums[-1]
    assert isinstance(term, Node)
    with graph.inserting_before(last):
        made = [graph.call_function(comm_ops.scatter_part, (term, axis, cut.plain))]
        for other in others:
            made.append(graph.call_function(comm_ops.all_reduce, (made[-1], other, "sum")))
    value = last.meta["val"].new_empty(cut.part_shape(0))
    for node in made:
        describe(node, info_of(last), value)
    return made[-1]
