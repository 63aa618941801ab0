"""Brings values to the device in buckets, one bucket ahead of their first readers.

A bucket is started where the bucket before it is first read, and waited for where it is first read itself. So at most
two buckets are on the device or in flight. ZeRO-3 gathers parameters so: those that are read one after the other share
a bucket, the whole tensors live until their last reader, and a parameter that is cast before it is gathered is cast
while it is copied into the bucket.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from plait.backends.eager.collectives import gather_part
from plait.comm.protocol import Comm, World
from plait.compile.ir.calls import num_bytes
from plait.compile.ir.node_info import NodeInfo, describe, info_of, phase_of, set_info
from plait.compile.ops import CollectiveKind, Communication, MemoryUse, OpSpec, register
from plait.compile.sharding.flat_shards import Cut, FlatShards, PlainRows, rows_of
from plait.cost.memory_model import BUFFERS
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
    wait: Callable[[Gathering], list[Tensor]],
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


aten = torch.ops.aten


class Gathering:
    """A gather in flight of whole tensors, into new memory or into `wholes`."""

    def __init__(
        self,
        comm: Comm,
        plain: PlainRows,
        dtypes: tuple[torch.dtype, ...],
        parts: tuple[Tensor, ...],
        wholes: list[Tensor] | None = None,
    ) -> None:
        self._rows = rows_of(plain)
        self._dtypes = dtypes
        self._like = parts[0]
        rank = comm.rank
        flat = comm.buffer(self._rows.length, dtypes[0])
        row = parts[0].new_empty(self._rows.length, dtype=dtypes[0]) if flat is None else flat
        for index, part in enumerate(parts):
            self._rows.place(row, index, rank).copy_(part)
        self._wholes = wholes or []
        self._takes = comm.takes
        self._work: Any = comm.all_gather(row, take=self._take) if self._takes else comm.all_gather(row)

    def _make_wholes(self) -> list[Tensor]:
        """The whole tensors, in new memory once there is something to copy into them."""
        if not self._wholes:
            self._wholes = [
                self._like.new_empty(cut.shape, dtype=dtype)
                for cut, dtype in zip(self._rows.cuts, self._dtypes, strict=True)
            ]
        return self._wholes

    def _take(self, rank: int, row: Tensor) -> None:
        self._rows.take(row, rank, self._make_wholes())

    def wait(self) -> list[Tensor]:
        """The whole tensors."""
        work, self._work = self._work, None  # it refers to this object: a cycle would keep the rows alive
        rows = work.wait()
        if not self._takes:
            self._rows.take_all(rows, self._make_wholes())
        wholes, self._wholes = self._wholes, []
        return wholes


def gather_start(
    world: World, axis: str, plain: PlainRows, dtypes: tuple[torch.dtype, ...], *parts: Tensor
) -> Gathering:
    """Start the gather of whole tensors of which every rank has a part."""
    return Gathering(world.comm(axis), plain, tuple(dtypes), parts)


def gather_wait(work: Gathering) -> list[Tensor]:
    return work.wait()


register(
    gather_start,
    spec=OpSpec(
        communicates=Communication(CollectiveKind.ALL_GATHER, "start", counted=True), memory=MemoryUse(BUFFERS)
    ),
)
register(
    gather_wait,
    spec=OpSpec(communicates=Communication(CollectiveKind.ALL_GATHER, "wait", counted=True), memory=MemoryUse(BUFFERS)),
)


def bucket_gathers(graph: Graph, bucket_bytes: int) -> Graph:
    """Join gathers of parameters in buckets of `bucket_bytes`, each started one bucket ahead of its use.

    Changes `graph` and returns it.
    """
    gathers = [node for node in graph.nodes if node.target is gather_part]
    parts = {node: _part_of(node) for node in gathers}

    def start(members: list[Node]) -> Node:
        world, _, axis, _ = members[0].args
        rows = FlatShards(tuple(_cut_of(node) for node in members))
        dtypes = tuple(node.meta["val"].dtype for node in members)
        args = (world, axis, rows.plain, dtypes, *(parts[node] for node in members))
        begun = graph.call_function(gather_start, args)
        set_info(begun, num_bytes=rows.length * dtypes[0].itemsize, what=f"{len(members)} parameters")
        return begun

    for phase in ("forward", "backward"):
        readers = {node: list(node.users) for node in gathers if phase_of(node) == phase}
        groups: dict[Any, dict[Node, list[Node]]] = {}  # a bucket has one dtype, and is gathered along one axis
        for node in in_order(graph, readers):
            groups.setdefault((node.meta["val"].dtype, node.args[2]), {})[node] = readers[node]
        for group in groups.values():
            read_ahead(graph, in_buckets(graph, group, bucket_bytes), group, start, gather_wait, "zero=3")
    for node in gathers:
        cast = node.args[1]
        graph.erase_node(node)
        if cast is not parts[node]:
            graph.erase_node(cast)
    return graph


def _part_of(gather: Node) -> Node:
    """The tensor that a gather sends, before it is cast."""
    sent = gather.args[1]
    assert isinstance(sent, Node)
    return sent.all_input_nodes[0] if sent.target is aten._to_copy.default else sent


def _cut_of(gather: Node) -> Cut:
    return Cut(*gather.args[3])  # type: ignore[misc]
