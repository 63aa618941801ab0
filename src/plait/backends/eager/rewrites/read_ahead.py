"""Reading ahead: values that come from elsewhere, in buckets in the order of their first readers.

A bucket is asked for where the bucket before it is first read, and waited for where it is first read itself, so that at
most two buckets are on the device or on their way.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.fx import Graph, Node

from plait.backends.eager.rewrites.offload_ops import coming_wait
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
    """The nodes in the order of their first readers, in buckets."""
    members = in_order(graph, readers)
    sizes = [num_bytes(node.meta["val"]) for node in members]
    limit = bucket_limit(sum(sizes), bucket_bytes)
    return [[members[i] for i in bucket] for bucket in split_buckets(sizes, limit, limit)]


def read_ahead(
    graph: Graph,
    buckets: Sequence[Sequence[Node]],
    readers: Readers,
    start: Callable[[list[Node]], Node],
    before: Node | None = None,
    wait: Callable[[Any], list[Tensor]] = coming_wait,
    origin: str = "home",
) -> None:
    """Have `readers` read what `start(members)` brings in place of the members of each bucket.

    `wait` is called on what that call gives. Members that lie on different ranks come by calls of their own. The first
    bucket is asked for at `before` if that comes earlier than where it is read.
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
            describe(begun, replace(shared, num_bytes=size, what=own.what), None)
            with graph.inserting_before(reader):
                done = graph.call_function(wait, (begun,))
                describe(done, shared, values)
                for index, node in enumerate(members):
                    item = graph.call_function(operator.getitem, (done, index))
                    info = replace(info_of(node), phase=shared.phase, module=shared.module, origin=origin, owner=owner)
                    describe(item, info, values[index])
                    for user in readers[node]:
                        user.replace_input_with(node, item)
        before = reader


def _alike(bucket: Sequence[Node]) -> Iterator[list[Node]]:
    """The members that lie on the same ranks."""
    found: dict[Any, list[Node]] = {}
    for node in bucket:
        found.setdefault(tuple(sorted(info_of(node).owner.items())), []).append(node)
    yield from found.values()
