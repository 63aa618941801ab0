"""From the graph that all ranks share to the one that a rank at given coordinates runs.

They differ only where a user put parameters on one rank of an axis (parallel branches): the other ranks leave that
branch out, and put in zeros where it joins the rest.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.fx import Graph, Node

from plait.compile.ir.calls import is_tensor, output_node
from plait.compile.ir.node_info import NodeInfo, describe, info_of


def runs_here(node: Node, coordinates: Mapping[str, int]) -> bool:
    return all(coordinates[axis] == index for axis, index in info_of(node).owner.items())


def specialise(graph: Graph, coordinates: Mapping[str, int]) -> Graph:
    """A copy without the nodes of other ranks' branches. An output that lies elsewhere becomes None."""
    if not any(info_of(node).owner for node in graph.nodes):
        return graph
    copy = Graph()
    copied: dict[Node, Node] = {}
    result = copy.graph_copy(graph, copied)
    copy.output(result)
    elsewhere = [n for n in copy.nodes if n.op != "output" and not runs_here(n, coordinates)]
    end = output_node(copy)
    (results,) = end.args
    end.args = (tuple(None if r in elsewhere else r for r in results),)  # type: ignore[union-attr]
    for node in reversed(elsewhere):
        readers = [user for user in node.users if user not in elsewhere]
        if readers and is_tensor(node):
            value = node.meta["val"]
            with copy.inserting_after(node):
                zeros = copy.call_function(
                    torch.ops.aten.zeros.default, (list(value.shape),), {"dtype": value.dtype, "device": value.device}
                )
            describe(zeros, NodeInfo(), value)
            for reader in readers:
                reader.replace_input_with(node, zeros)
    for node in reversed(elsewhere):
        if node.op != "placeholder" and not node.users:
            copy.erase_node(node)
    copy.lint()
    return copy
