"""Activations whose home is elsewhere: what backward reads of the forward pass leaves the device between the two.

A value leaves as soon as it is made and comes back one bucket ahead of its first reader in the backward pass (Rhu et
al. 2016, "vDNN"). What that reads first never leaves. Views are made anew of what came back.
"""

from __future__ import annotations

from torch.fx import Graph, Node

from plait.backends.eager.rewrites.offload_ops import homes_of, stash, unstash_start
from plait.backends.eager.rewrites.read_ahead import in_buckets, read_ahead
from plait.compile.ir.calls import is_tensor, num_bytes
from plait.compile.ir.node_info import NodeInfo, describe, info_of, is_backward
from plait.compile.ir.views import is_view, view_anew
from plait.cost.memory_model import padded
from plait.plan.sharding_plan import is_large


def stash_activations(graph: Graph, bucket_bytes: int) -> Graph:
    """Let large values of the forward pass leave until backward reads them. Changes `graph` and returns it.

    The graph is one in which nothing has been moved yet: backward begins with the first of its calls.
    """
    nodes = list(graph.nodes)
    calls = [node for node in nodes if node.op == "call_function"]
    begin = next((node for node in calls if is_backward(node)), None)
    if begin is None:
        return graph
    late = set(nodes[nodes.index(begin) :])
    early = [node for node in calls if node not in late]
    views = [node for node in early if is_view(node)]
    late |= view_anew(graph, views, lambda user: user in late and user.op != "output")
    readers = {
        node: users
        for node in early
        if is_tensor(node) and is_large(node.meta["val"].numel()) and not is_view(node)
        if (users := [u for u in node.users if u in late]) and all(u.op != "output" for u in users)
    }
    first, *buckets = in_buckets(graph, readers, bucket_bytes) or [[]]
    if not buckets:
        return graph
    homes = homes_of(graph)
    tokens: dict[Node, Node] = {}
    offset = 0
    leaving = {node for bucket in buckets for node in bucket}
    for node in [node for node in early if node in leaving]:
        with graph.inserting_after(node):
            token = tokens[node] = graph.call_function(stash, (homes, offset, node))
        made, size = info_of(node), num_bytes(node.meta["val"])
        describe(token, NodeInfo(phase=made.phase, module=made.module, owner=made.owner, num_bytes=size), None)
        offset += padded(node.meta["val"].nbytes)

    def start(members: list[Node]) -> Node:
        return graph.call_function(unstash_start, (homes, *(tokens[node] for node in members)))

    read_ahead(graph, buckets, readers, start, min(user for node in first for user in readers[node]))
    graph.lint()
    return graph


def stashed_bytes(graph: Graph) -> int:
    """Bytes that a graph has away at once, each value in whole pages."""
    return sum(padded(info_of(node).num_bytes) for node in graph.nodes if node.target is stash)
