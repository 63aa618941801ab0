"""Sums gradients over ranks in buckets, while backward still runs.

As in PyTorch DDP (Li et al. 2020, "PyTorch Distributed"), the collective of a bucket starts once its last gradient is
computed, and the first bucket is small so that communication starts early. A bucket is one flat buffer. Either it holds
whole gradients and is all-reduced, or it holds the parts of each rank and is reduce-scattered (Rajbhandari et al. 2020,
"ZeRO"). Only sums that nothing in the graph reads are bucketed.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from plait.backends.eager.collectives import all_reduce, scatter_part, take_part
from plait.comm.protocol import REDUCTIONS, Work, World
from plait.compile.ir.calls import drop_dead_calls, is_cast, op_spec_of, output_node, settled
from plait.compile.ir.node_info import describe, info_of
from plait.compile.ops import CollectiveKind, Communication, MemoryUse, OpSpec, register
from plait.compile.sharding.flat_shards import Cut, FlatShards, PlainRows, rows_of
from plait.cost.memory_model import BUFFERS, GRADIENTS
from plait.schedule.buckets import bucket_limit, split_buckets

aten = torch.ops.aten


def bucket_new(world: World, axis: str, num_elements: int, like: Tensor, dtype: torch.dtype) -> Tensor:
    """A flat buffer without values, in memory that the transport can send from if it has such memory."""
    flat = world.comm(axis).buffer(num_elements, dtype)
    return like.new_empty(num_elements, dtype=dtype) if flat is None else flat


def bucket_put(flat: Tensor, offset: int, tensor: Tensor) -> Tensor:
    """Copy a tensor into the buffer, so that the tensor can be freed. Returns the buffer."""
    flat.narrow(0, offset, tensor.numel()).view(tensor.shape).copy_(tensor)
    return flat


def bucket_start(world: World, flat: Tensor, axes: Sequence[str]) -> Work:
    """Start the all-reduce of a full buffer over the first of the axes."""
    return world.comm(axes[0]).all_reduce(flat, consume=True)


def bucket_wait(
    world: World, work: Work, axes: Sequence[str], dtype: torch.dtype, shapes: Sequence[Sequence[int]]
) -> list[Tensor]:
    """The sums over all axes, as views of one flat tensor."""
    flat = _sum_on(world, work.wait(), axes[1:]).to(dtype)
    sizes = [math.prod(shape) for shape in shapes]
    return [part.view(shape) for part, shape in zip(flat.split(sizes), shapes, strict=True)]


def rows_put(flat: Tensor, plain: PlainRows, index: int, tensor: Tensor) -> Tensor:
    """Copy the parts that all ranks get of member `index` into the buffer. Returns the buffer."""
    rows = rows_of(plain)
    rows.put(flat.view(rows.num_ranks, rows.length), index, tensor)
    return flat


def rows_start(world: World, flat: Tensor, axes: Sequence[str]) -> Work:
    """Start the reduce-scatter of a full buffer, which has one row per rank, over the first of the axes."""
    comm = world.comm(axes[0], REDUCTIONS)
    return comm.reduce_scatter(flat.view(comm.size, -1), consume=True)


def rows_wait(world: World, work: Work, axes: Sequence[str], dtype: torch.dtype, plain: PlainRows) -> list[Tensor]:
    """This rank's parts of the sums over all axes, as views of one flat tensor."""
    rows = rows_of(plain)
    flat = _sum_on(world, work.wait(), axes[1:]).to(dtype)
    return [rows.place(flat, index, world.comm(axes[0]).rank) for index in range(len(rows.cuts))]


_GRADIENTS = MemoryUse(BUFFERS, GRADIENTS)
register(bucket_new, spec=OpSpec(memory=MemoryUse(BUFFERS)))
register(bucket_put, spec=OpSpec(memory=MemoryUse(BUFFERS), puts=2))
register(rows_put, spec=OpSpec(memory=MemoryUse(BUFFERS), puts=3))
register(
    bucket_start,
    spec=OpSpec(
        communicates=Communication(CollectiveKind.ALL_REDUCE, "start", axis=2, counted=True),
        memory=MemoryUse(GRADIENTS),
    ),
)
register(
    rows_start,
    spec=OpSpec(
        communicates=Communication(CollectiveKind.REDUCE_SCATTER, "start", axis=2, counted=True),
        memory=MemoryUse(GRADIENTS),
    ),
)
register(
    bucket_wait,
    spec=OpSpec(communicates=Communication(CollectiveKind.ALL_REDUCE, "wait", counted=True), memory=_GRADIENTS),
)
register(
    rows_wait,
    spec=OpSpec(communicates=Communication(CollectiveKind.REDUCE_SCATTER, "wait", counted=True), memory=_GRADIENTS),
)


def bucket_part(node: Node) -> str:
    """Whether a call starts the sum of a bucket ("start") or waits for it ("wait"); "" for any other call."""
    does = op_spec_of(node).communicates
    return does.part if does is not None and does.counted and does.kind is not CollectiveKind.ALL_GATHER else ""


def _sum_on(world: World, flat: Tensor, axes: Sequence[str]) -> Tensor:
    for axis in axes:
        flat = world.comm(axis).all_reduce(flat, consume=True).wait()
    return flat


def bucket_gradients(
    graph: Graph,
    bucket_bytes: int,
    gradients: Collection[int] = (),
    first_bytes: int = 1 << 20,
    but: Collection[int] = (),
    narrow: torch.dtype | None = None,
) -> Graph:
    """Join the sums that the graph only returns in buckets. Changes `graph` and returns it.

    bucket_bytes  size of a bucket
    gradients     indices of the outputs that are gradients
    first_bytes   size of the first bucket
    but           indices of outputs whose sums are left as they are
    narrow        the dtype in which gradients of wider dtypes are sent; None: in their own
    """
    groups: dict[Any, list[PendingReduction]] = {}
    for one in pending_reductions(graph, but):
        only = tuple(sorted(info_of(one.sums[-1]).owner.items()))
        dtype = one.term.meta["val"].dtype
        sent = narrow if narrow is not None and one.index in gradients and _is_wider(dtype, narrow) else dtype
        groups.setdefault((one.axes, one.cut is not None, (sent, dtype), only), []).append(one)
    end = output_node(graph)
    for (_, _, (dtype, _), _), members in groups.items():
        sizes = [one.term.meta["val"].numel() * dtype.itemsize for one in members]
        for bucket in split_buckets(sizes, bucket_limit(sum(sizes), bucket_bytes), first_bytes):
            chosen = [members[i] for i in bucket]
            num = sum(one.index in gradients for one in chosen)
            joined = _join(graph, chosen, dtype, end, f"{num} gradients" if num else "the loss")
            for one, item in zip(chosen, joined, strict=True):
                one.sums[-1].replace_all_uses_with(item)
                for node in reversed(one.sums):
                    graph.erase_node(node)
    _finish_late(end)
    drop_dead_calls(graph)
    return graph


def _finish_late(end: Node) -> None:
    """Move the calls that finish the outputs behind the sums that they read."""
    results: Sequence[Node | None] = end.args[0]  # type: ignore[assignment]
    finish = [node for r in results if isinstance(r, Node) for node in _finishing(r, end)[::-1]]
    for node in finish:
        if node.target is take_part:
            end.prepend(node)
    for node in finish:
        if node < (last := max(node.all_input_nodes)):
            last.append(node)


def _is_wider(dtype: torch.dtype, narrow: torch.dtype) -> bool:
    return dtype.is_floating_point and dtype.itemsize > narrow.itemsize


def _join(graph: Graph, members: list[PendingReduction], sent: torch.dtype, end: Node, what: str) -> list[Node]:
    """Write one collective for the members, which sends the dtype `sent`. Returns for each member the node that
    replaces its sum."""
    axes, world = members[0].axes, members[0].sums[0].args[0]
    rows = FlatShards(tuple(one.cut for one in members)) if members[0].cut is not None else None  # type: ignore[misc]
    values = [one.sums[-1].meta["val"] for one in members]
    terms = [one.source(sent) for one in members]
    info = info_of(members[-1].sums[-1])
    total = rows.length * rows.num_ranks if rows else sum(value.numel() for value in values)
    flat: Node | None = None
    offset = 0
    for index, tensor in enumerate(terms):
        if flat is None:
            with graph.inserting_after(settled(tensor)):
                flat = graph.call_function(bucket_new, (world, axes[0], total, tensor, sent))
                describe(flat, info, None)
        with graph.inserting_after(max(flat, tensor)):
            if rows is not None:
                flat = graph.call_function(rows_put, (flat, rows.plain, index, tensor))
            else:
                flat = graph.call_function(bucket_put, (flat, offset, tensor))
            describe(flat, info, None)
        offset += tensor.meta["val"].numel()
    with graph.inserting_after(flat):
        start = graph.call_function(rows_start if rows is not None else bucket_start, (world, flat, axes))
        describe(start, info._replace(num_bytes=total * sent.itemsize, what=what), None)
    dtype = values[0].dtype
    with graph.inserting_before(end):
        if rows is not None:
            done = graph.call_function(rows_wait, (world, start, axes, dtype, rows.plain))
        else:
            done = graph.call_function(bucket_wait, (world, start, axes, dtype, [list(v.shape) for v in values]))
        describe(done, info, values)
        found = []
        for index, one in enumerate(members):
            found.append(graph.call_function(operator.getitem, (done, index)))
            describe(found[-1], info_of(one.sums[-1]), values[index])
    return found


@dataclass(frozen=True)
class PendingReduction:
    """Output `index` of a graph is the sum of `term` over mesh axes, which the collectives `sums` compute in order."""

    index: int
    term: Node
    sums: tuple[Node, ...]

    @property
    def axes(self) -> tuple[str, ...]:
        return tuple(str(node.args[2]) for node in self.sums)

    @property
    def cut(self) -> Cut | None:
        """The cut of the sum along the first of the axes, if each rank keeps a part; None if it is all-reduced."""
        first = self.sums[0]
        return Cut(*first.args[3]) if first.target is scatter_part else None  # type: ignore[misc]

    def source(self, dtype: torch.dtype) -> Node:
        """The tensor to copy into a buffer of this dtype: the term; if the term is a cast without other readers, the
        value before the cast. The copy then casts it."""
        source = self.term.args[0] if is_cast(self.term) and len(self.term.users) == 1 else None
        exact = isinstance(source, Node) and torch.promote_types(source.meta["val"].dtype, dtype) == dtype
        return source if exact else self.term  # type: ignore[return-value]


def pending_reductions(graph: Graph, but: Collection[int] = ()) -> list[PendingReduction]:
    """The outputs whose sums nothing else in the graph reads, in the order of their terms; those in `but` are left
    out."""
    end = output_node(graph)
    (results,) = end.args
    order = {node: i for i, node in enumerate(graph.nodes)}
    found: dict[Node, PendingReduction] = {}
    for index, result in enumerate(results):  # type: ignore[arg-type]
        if not isinstance(result, Node) or index in but:
            continue
        finish = _finishing(result, end)
        summed, reader = (_source(finish[-1]), finish[-1]) if finish else (result, end)
        node, sums = summed, list[Node]()
        while _is_sum(node) and set(node.users) == {reader}:
            sums.append(node)
            node, reader = _source(node), node
        if sums and summed not in found:
            found[summed] = PendingReduction(index, node, tuple(reversed(sums)))
    return sorted(found.values(), key=lambda one: order[one.term])


def _finishing(result: Node, reader: Node) -> list[Node]:
    """The calls that turn a sum into output `result`, the last one first: this rank takes its part of the sum, and adds
    it to the sum over earlier microbatches."""
    found: list[Node] = []
    while (result.target is take_part or _adds_to_sum(result)) and set(result.users) == {reader}:
        found.append(result)
        result, reader = _source(result), result
    return found


def _adds_to_sum(node: Node) -> bool:
    """Whether a call adds to the sum of a gradient over earlier microbatches."""
    given = node.args[0] if node.target is aten.add.Tensor else None
    return isinstance(given, Node) and given.op == "placeholder" and info_of(given).kind == "sum"


def _source(node: Node) -> Node:
    """The tensor that a sum, a part or an addition reads."""
    source = node.args[1]
    assert isinstance(source, Node)
    return source


def _is_sum(node: Node) -> bool:
    return node.target is scatter_part or (node.target is all_reduce and node.args[3] == "sum")
