"""Sums of gradients over ranks come last: casts and views of a sum become those of its terms.

A kernel may accumulate the gradient of a half-precision weight in float32, as that of RMS norm does. One device rounds
it once at the end. Ranks that sum first and round later would send twice the bytes, for each microbatch, and in no
bucket, because what is returned is no sum. A term is a gradient in the dtype of its weight, as those of products are,
and as PyTorch's DDP sends them.
"""

from __future__ import annotations

from collections.abc import Collection

from torch.fx import Graph, Node

from plait.compile.ir.calls import drop_dead_calls, output_node
from plait.compile.ir.views import is_cast, is_whole_view
from plait.compile.passes.zero import is_sum


def sum_last(graph: Graph, gradients: Collection[int]) -> Graph:
    """Let outputs of a local graph be sums where they are casts or views of sums. Changes `graph` and returns it.

    `gradients` are the indices of the outputs.
    """
    end = output_node(graph)
    results = list(end.args[0])  # type: ignore[arg-type]
    for index in gradients:
        if isinstance(result := results[index], Node):
            results[index] = _summed_last(graph, result, end)
    end.args = (tuple(results),)
    drop_dead_calls(graph)
    return graph


def _summed_last(graph: Graph, result: Node, end: Node) -> Node:
    steps: list[Node] = []  # the last one first
    node, reader = result, end
    while (is_sum(node) or is_cast(node) or is_whole_view(node)) and {*node.users} == {reader}:
        steps.append(node)
        node, reader = node.all_input_nodes[0], node
    while steps and not is_sum(steps[-1]):
        steps.pop()
    changes = [step for step in reversed(steps) if not is_sum(step)]
    if not changes:
        return result
    sums = [step for step in reversed(steps) if is_sum(step)]
    term = sums[0].all_input_nodes[0]
    with graph.inserting_before(sums[0]):  # as early as before, so that they are sent while backward runs
        for step in (*changes, *sums):
            made = graph.node_copy(step)
            made.replace_input_with(step.all_input_nodes[0], term)
            if is_sum(step):
                made.meta["val"] = result.meta["val"]
            term = made
    return term
