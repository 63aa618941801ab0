"""Brings values to the device in buckets, one bucket ahead of their first readers.

A bucket is started where the bucket before it is first read, and waited for where it is first read itself. So at most
two buckets are on the device or in flight.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.fx import Graph, Node

from plait.compile.ir.calls import num_bytes
from plait.compile.ir.node_info import NodeInfo, describe, info_of, phase_of
from plait.schedule.buckets import bucket_limit, split_buckets

Readers = Mapping[Node, Sequence[Node]]


def in_order(graph: Graph, readers: Readers) -> list[Node]:
    """The nodes in the order of their first readers."""
    order = {node: i for i, node in enumerate(graph.nodes)}
    first = {node: min(order[u] for u in users) for node, users in readers.items()}
    return sorted(first, key=first.__getitem__)


def in_buckets(graph: Graph, readers: Readers, bucket_bytes: int) -> list[list[Node]]:
    """The nodes in the order of their first readers, in buckets of at most `bucket_bytes`."""
    members = in_order(graph, readers)
    sizes = [num_bytes(node.meta["val"]) for node in members]
    limit = bucket_limit(sum(sizes), bucket_bytes)
    return [[members[i] for i in bucket] for bucket in split_buckets(sizes, limit, limit)]


def read_ahead(
    graph: Graph,
    buckets: Sequence[Sequence[Node]],
    readers: Readers,
    start: Callable[[list[Node]], Node],
    wait: Callable[[Any], list[Tensor]],
    origin: str,
    before: Node | None = None,
) -> None:
    """Let readers take the members of each bucket from calls that bring the bucket to the device. Changes `graph`.

    readers  for each member, the nodes that read it
    start    appends the call that starts to bring some members, and returns its node
    wait     the function that takes the result of that call, and returns the tensors
    origin   where the members come from, for NodeInfo
    before   node at which the first bucket is started, if it comes before the bucket's first reader

    Members that lie on different ranks are brought by different calls.
    """
    order = {node: i for i, node in enumerate(graph.nodes)}
    for bucket in buckets:
        reader = min((u for node in bucket for u in readers[node]), key=order.__getitem__)
        for members in _alike(bucket):
            owner = info_of(members[0]).owner
            shared = NodeInfo(phase=phase_of(reader), module=info_of(reader).module, origin=origin, owner=owner)
            values = [node.meta["val"] for node in members]
            with graph.inserting_before(before if before is not None and before < reader else reader):
                begun = start(members)
            own = info_of(begun)
            size = own.num_bytes or sum(num_bytes(v) for v in values)
            describe(begun, shared._replace(num_bytes=size, what=own.what), None)
            with graph.inserting_before(reader):
                done = graph.call_function(wait, (begun,))
                describe(done, shared, values)
                for index, node in enumerate(members):
                    item = graph.call_function(operator.getitem, (done, index))
                    info = info_of(node)._replace(phase=shared.phase, module=shared.module, origin=origin, owner=owner)
                    describe(item, info, values[index])
                    for user in readers[node]:
                        user.replace_input_with(node, item)
        before = reader


def _alike(bucket: Sequence[Node]) -> Iterator[list[Node]]:
    """The members, grouped by the ranks that they lie on."""
    found: dict[Any, list[Node]] = {}
    for node in bucket:
        found.setdefault(tuple(sorted(info_of(node).owner.items())), []).append(node)
    yield from found.values()
