"""Sum gradients while backward still runs: the all-reduces that only feed the step's results are joined in buckets.

As in PyTorch DDP (Li et al. 2020, "PyTorch Distributed"), a bucket leaves as soon as its last gradient is there, and
the first one is small so that the wire starts early. Each bucket is one all-reduce over one flat buffer.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from plait.decide.buckets import bucket_limit, split_buckets
from plait.graph import ops
from plait.graph.calls import num_bytes, output_node
from plait.graph.partition import WORLD

aten = torch.ops.aten
_VIEWS = frozenset({aten.reshape.default, aten.t.default, aten.transpose.int, aten.permute.default})


def bucket_new(world: Any, axis: str, num_elements: int, like: Tensor) -> Tensor:
    """An empty flat buffer, in memory that the transport sends from if it has such."""
    flat = world.comm(axis).buffer(num_elements, like.dtype)
    return like.new_empty(num_elements) if flat is None else flat


def bucket_put(flat: Tensor, offset: int, tensor: Tensor) -> Tensor:
    """Copy a tensor into the buffer, so that its own memory is free at once. Returns the buffer."""
    flat.narrow(0, offset, tensor.numel()).view(tensor.shape).copy_(tensor)
    return flat


def bucket_start(world: Any, flat: Tensor, axis: str) -> Any:
    """Begin the sum of a full buffer over the axis."""
    return world.comm(axis).all_reduce(flat, consume=True)


def bucket_wait(work: Any, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """The sums, as views of one flat tensor."""
    flat = work.wait()
    sizes = [math.prod(shape) for shape in shapes]
    return [part.view(shape) for part, shape in zip(flat.split(sizes), shapes, strict=True)]


def bucket_gradients(graph: Graph, bucket_bytes: int, first_bytes: int = 1 << 20) -> Graph:
    """Join all-reduces whose results only leave the graph. Changes `graph` and returns it."""
    order = {node: i for i, node in enumerate(graph.nodes)}
    groups: dict[Any, list[Node]] = {}
    for node in graph.nodes:
        if node.target is ops.all_reduce and node.args[3] == "sum" and all(u.op == "output" for u in node.users):
            key = (node.args[2], node.meta["val"].dtype, tuple(sorted(node.meta.get("only", {}).items())))
            groups.setdefault(key, []).append(node)
    if not groups:
        return graph
    end = output_node(graph)
    world = next(node for node in graph.nodes if node.name == WORLD)
    summed: dict[Node, Node] = {}
    for (axis, _, _), nodes in groups.items():
        nodes.sort(key=lambda n: order[n.args[1]])
        sizes = [num_bytes(n.meta["val"]) for n in nodes]
        for members in split_buckets(sizes, bucket_limit(sum(sizes), bucket_bytes), first_bytes):
            summed |= _join(graph, world, axis, [nodes[i] for i in members], end)
    (results,) = end.args
    end.args = (tuple(summed.get(r, r) for r in results),)  # type: ignore[union-attr,arg-type]
    for node in summed:
        graph.erase_node(node)
    return graph


def _join(graph: Graph, world: Node, axis: str, nodes: list[Node], end: Node) -> dict[Node, Node]:
    """One all-reduce for the nodes; returns what takes each one's place."""
    values = [node.meta["val"] for node in nodes]
    meta = {k: v for k, v in nodes[-1].meta.items() if k != "val"}
    total = sum(value.numel() for value in values)
    flat: Any = None
    offset = 0
    for node, value in zip(nodes, values, strict=True):
        tensor: Any = node.args[1]
        if flat is None:
            with graph.inserting_after(tensor):
                flat = graph.call_function(bucket_new, (world, axis, total, tensor))
                flat.meta = {**meta, "val": None}
        with graph.inserting_after(max(flat, tensor)):
            flat = graph.call_function(bucket_put, (flat, offset, tensor))
            flat.meta = {**meta, "val": None}
        offset += value.numel()
    with graph.inserting_after(flat):
        start = graph.call_function(bucket_start, (world, flat, axis))
        start.meta = {**meta, "val": None, "bytes": sum(map(num_bytes, values)), "num": len(nodes)}
    with graph.inserting_before(end):
        done = graph.call_function(bucket_wait, (start, [list(value.shape) for value in values]))
        done.meta = {**meta, "val": values}
        found = {}
        for i, node in enumerate(nodes):
            found[node] = graph.call_function(operator.getitem, (done, i))
            found[node].meta = dict(node.meta)
    return found


def _hoist_views(node: Any) -> None:
    """Move a view, and what it views, up to where the memory is made."""
    if node.target in _VIEWS:
        source = node.args[0]
        _hoist_views(source)
        source.append(node)


def overlap(graph: Graph) -> Graph:
    """Start each remaining all-reduce where its input is made and wait for it where its result is first read."""
    for node in list(graph.nodes):
        if node.target is not ops.all_reduce:
            continue
        _hoist_views(node.args[1])
        reader = min(node.users)
        if reader.prev is node and node.prev is node.args[1]:
            continue  # nothing lies between
        with graph.inserting_after(node.args[1]):
            start = graph.call_function(ops.all_reduce_start, node.args)
        start.meta = {**node.meta, "val": None}
        with graph.inserting_before(reader):
            done = graph.call_function(ops.wait, (start,))
        done.meta = dict(node.meta)
        node.replace_all_uses_with(done)
        graph.erase_node(node)
    graph.lint()
    return graph
