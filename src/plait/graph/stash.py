"""Activations whose home is elsewhere: what backward reads of the forward pass leaves the device between the two.

A value leaves as soon as it is made and comes back one bucket ahead of its first reader in the backward pass (Rhu et
al. 2016, "vDNN"). What that reads first never leaves. Views are made anew of what came back.
"""

from __future__ import annotations

from torch.fx import Graph, Node

from plait.graph.ahead import in_buckets, read_ahead, readers_in
from plait.graph.calls import num_bytes
from plait.graph.gather import repeat_views
from plait.graph.homes import homes_of, is_large, stash, unstash_start
from plait.graph.recompute import saved_nodes

_ALIGN = 4096  # of offsets: a disk's page


def stash_activations(graph: Graph, bucket_bytes: int) -> Graph:
    """Let large values of the forward pass leave until backward reads them. Changes `graph` and returns it."""
    order = {node: i for i, node in enumerate(graph.nodes)}
    saved = sorted(saved_nodes(graph), key=order.__getitem__)
    saved = [node for node in saved if is_large(node.meta["val"].numel())]
    repeat_views(graph, saved)
    readers = readers_in("backward", saved)
    first, *buckets = in_buckets(graph, readers, bucket_bytes) or [[]]
    if not buckets:
        return graph
    homes = homes_of(graph)
    tokens: dict[Node, Node] = {}
    offset = 0
    for node in [node for node in saved if any(node in bucket for bucket in buckets)]:
        with graph.inserting_after(node):
            token = tokens[node] = graph.call_function(stash, (homes, offset, node))
        token.meta = {k: v for k, v in node.meta.items() if k in ("only", "module", "phase")}
        token.meta |= {"val": None, "bytes": num_bytes(node.meta["val"])}
        offset += -(-num_bytes(node.meta["val"]) // _ALIGN) * _ALIGN

    def start(members: list[Node]) -> Node:
        return graph.call_function(unstash_start, (homes, *(tokens[node] for node in members)))

    read_ahead(graph, buckets, readers, start, min(user for node in first for user in readers[node]))
    graph.lint()
    return graph


def stashed_bytes(graph: Graph) -> int:
    """Bytes that a graph has away at once, each value rounded up to whole pages."""
    found = [node for node in graph.nodes if node.target is stash]
    return sum(-(-node.meta["bytes"] // _ALIGN) * _ALIGN for node in found)
