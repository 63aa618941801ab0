"""Parameters whose home is elsewhere: fetched before their use and let go after it, in forward and again in backward.

(Rajbhandari et al. 2021, "ZeRO-Infinity".) What the end of the forward pass reads is kept for the start of the
backward pass. Gradients leave as soon as they are there; sums that microbatches add to come back in the same way.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence

import torch
from torch.fx import Graph, Node

from plait.backends.eager.collectives import take_part
from plait.backends.eager.rewrites.bucket import bucket_part
from plait.backends.eager.rewrites.offload_ops import fetch_start, homes_of, leave
from plait.backends.eager.rewrites.read_ahead import in_buckets, read_ahead
from plait.compile.ir.calls import output_node, placeholders, settled
from plait.compile.ir.node_info import NodeInfo, describe, info_of
from plait.compile.passes.zero import readers_in, repeat_views

aten = torch.ops.aten


def fetch_parameters(graph: Graph, away: Collection[str], bucket_bytes: int) -> Graph:
    """Let the graph fetch the parameters that `away` names. Changes `graph` and returns it."""
    held = [n for n in placeholders(graph) if info_of(n).kind == "parameter" and info_of(n).name in away]
    repeat_views(graph, held)
    forward, backward = readers_in("forward", held), readers_in("backward", held)
    buckets = in_buckets(graph, forward, bucket_bytes)
    kept = [node for node in buckets[-1] if node in backward] if buckets else []
    before = min((user for node in kept for user in backward[node]), default=None)
    for node in kept:
        forward[node] += backward.pop(node)
    _fetch(graph, buckets, forward, "input", None)
    _fetch(graph, in_buckets(graph, backward, bucket_bytes), backward, "input", before)
    return graph


def fetch_sums(graph: Graph, kind: str, away: Collection[str], bucket_bytes: int) -> Graph:
    """Let the graph fetch the sums so far of gradients that `away` names, which are kept as `kind`."""
    held = [n for n in placeholders(graph) if info_of(n).kind == "sum" and info_of(n).name in away]
    readers = readers_in("backward", held)
    _fetch(graph, in_buckets(graph, readers, bucket_bytes), readers, kind, None)
    return graph


def leave_early(graph: Graph, kind: str, gradients: Mapping[int, str], away: Collection[str]) -> Graph:
    """Let the gradients that `away` names leave as soon as they are there, to be kept as `kind`.

    `gradients` are the names of outputs. The sum of a bucket is waited for when the next bucket has left.
    """
    end = output_node(graph)
    results = list(end.args[0])  # type: ignore[arg-type]
    leaving = {i: name for i, name in gradients.items() if name in away and isinstance(results[i], Node)}
    if not leaving:
        return graph
    _wait_early(graph)
    homes = homes_of(graph)
    for index, name in leaving.items():
        node = results[index]
        if node.target in (take_part, aten.add_.Tensor):
            max(node.all_input_nodes).append(node)
        with graph.inserting_after(settled(node)):
            results[index] = graph.call_function(leave, (homes, f"{kind}/{name}", node))
        made = info_of(node)
        describe(results[index], NodeInfo(phase="backward", module=made.module, owner=made.owner), None)
    end.args = (tuple(results),)
    graph.lint()
    return graph


def _fetch(
    graph: Graph,
    buckets: Sequence[Sequence[Node]],
    readers: Mapping[Node, Sequence[Node]],
    kind: str,
    before: Node | None,
) -> None:
    if not buckets:
        return
    homes = homes_of(graph)

    def start(members: list[Node]) -> Node:
        return graph.call_function(fetch_start, (homes, tuple(f"{kind}/{info_of(n).name}" for n in members)))

    read_ahead(graph, buckets, readers, start, before)
    graph.lint()


def _wait_early(graph: Graph) -> None:
    """Move the wait for each bucket from the end to where the next one has left, with what reads only it."""
    starts = [node for node in graph.nodes if bucket_part(node) == "start"]
    waits = {node.args[1]: node for node in graph.nodes if bucket_part(node) == "wait"}
    for start, after in itertools.pairwise(starts):
        wait = waits[start]
        after.append(wait)
        last = wait
        for item in list(wait.users):
            last.append(item)
            last = item
