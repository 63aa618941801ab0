"""Parameters that each rank holds a part of: gathered before their use, let go after it (ZeRO-3, FSDP).

Parameters that are read one after the other are gathered in buckets. A bucket leaves one bucket ahead of its first
reader, and is waited for there; the whole tensors live until their last reader, and backward gathers them anew
(Rajbhandari et al. 2020, "ZeRO"; Zhao et al. 2023, "PyTorch FSDP"). A parameter that is only read in half precision
travels in half precision.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from plait.compile.ir.calls import placeholders
from plait.compile.ir.node_info import info_of, set_info
from plait.compile.ir.views import is_view, view_anew
from plait.compile.ops import CollectiveKind, Communication, MemoryUse, OpSpec, register
from plait.compile.passes.offload import phase_of
from plait.compile.passes.read_ahead import in_buckets, in_order, read_ahead, readers_in
from plait.compile.sharding.flat_shards import Cut, FlatShards, PlainRows, rows_of
from plait.compile.sharding.partition import WORLD
from plait.cost.memory_model import BUFFERS

aten = torch.ops.aten


class Gathering:
    """Whole tensors on their way: new ones, or those given."""

    def __init__(
        self,
        comm: Any,
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
        self._work: Any = comm.all_gather(row, take=self._take)

    def _take(self, rank: int, row: Tensor) -> None:
        if not self._wholes:
            self._wholes = [
                self._like.new_empty(cut.shape, dtype=dtype)
                for cut, dtype in zip(self._rows.cuts, self._dtypes, strict=True)
            ]
        self._rows.take(row, rank, self._wholes)

    def wait(self) -> list[Tensor]:
        work, self._work = self._work, None  # it holds this object, and no cycle may keep the rows
        work.wait()
        wholes, self._wholes = self._wholes, []
        return wholes


def gather_start(world: Any, axis: str, plain: PlainRows, dtypes: tuple[torch.dtype, ...], *parts: Tensor) -> Gathering:
    """Begin to put together the whole tensors of which every rank has a part."""
    return Gathering(world.comm(axis), plain, tuple(dtypes), parts)


def gather_wait(work: Gathering) -> list[Tensor]:
    return work.wait()


register(
    gather_start,
    spec=OpSpec(
        communicates=Communication(CollectiveKind.ALL_GATHER, "start", axis=1, counted=True), memory=MemoryUse(BUFFERS)
    ),
)
register(
    gather_wait,
    spec=OpSpec(communicates=Communication(CollectiveKind.ALL_GATHER, "wait", counted=True), memory=MemoryUse(BUFFERS)),
)


def gather_parameters(graph: Graph, cuts: Mapping[str, Cut], axis: str, bucket_bytes: int) -> Graph:
    """Let the placeholders that `cuts` names stand for this rank's part along `axis`. Changes and returns `graph`."""
    held = [node for node in placeholders(graph) if info_of(node).name in cuts]
    if not held:
        return graph
    narrow_parameters(held)
    repeat_views(graph, held)
    world = next(node for node in graph.nodes if node.name == WORLD)

    def start(members: list[Node]) -> Node:
        rows = FlatShards(tuple(cuts[info_of(node).name] for node in members))
        dtypes = tuple(node.meta["val"].dtype for node in members)
        begun = graph.call_function(gather_start, (world, axis, rows.plain, dtypes, *members))
        set_info(begun, num_bytes=rows.length * dtypes[0].itemsize, what=f"{len(members)} parameters")
        return begun

    for phase in ("forward", "backward"):
        readers = readers_in(phase, held)
        groups: dict[torch.dtype, dict[Node, list[Node]]] = {}  # what travels together is of one dtype
        for node in in_order(graph, readers):
            groups.setdefault(node.meta["val"].dtype, {})[node] = readers[node]
        for group in groups.values():
            read_ahead(graph, in_buckets(graph, group, bucket_bytes), group, start, wait=gather_wait, origin="zero=3")
    for node in held:
        value = node.meta["val"]
        part = cuts[info_of(node).name].part_shape(0)
        node.meta["val"] = value.new_empty(part, dtype=info_of(node).stored_dtype or value.dtype)
    graph.lint()
    return graph


def narrow_parameters(held: list[Node]) -> None:
    """Where every reader of a parameter first casts it to one narrower type, let it come in that type.

    Its placeholder then stands for the narrow tensor, and its `stored_dtype` is the type that the optimizer has. Nodes
    of several graphs that stand for one parameter are narrowed all or none.
    """
    by_name: dict[str, list[Node]] = {}
    for node in held:
        by_name.setdefault(info_of(node).name, []).append(node)
    for nodes in by_name.values():
        casts = [user for node in nodes for user in node.users]
        dtypes = {u.meta["val"].dtype for u in casts if u.target is aten._to_copy.default}
        if not casts or any(u.target is not aten._to_copy.default for u in casts) or len(dtypes) != 1:
            continue
        (dtype,) = dtypes
        for node in nodes:
            _narrow(node, dtype)


def _narrow(node: Node, dtype: torch.dtype) -> None:
    value = node.meta["val"]
    if dtype.itemsize >= value.dtype.itemsize:
        return
    set_info(node, stored_dtype=value.dtype)
    node.meta["val"] = value.new_empty(value.shape, dtype=dtype)
    for cast in list(node.users):
        cast.replace_all_uses_with(node)
        cast.graph.erase_node(cast)


def repeat_views(graph: Graph, held: list[Node]) -> None:
    """Views of a parameter that both phases read: backward makes its own, so that forward's memory can go."""
    found: set[Node] = set()
    stack = list(held)
    while stack:
        views = [u for u in stack.pop().users if u.op == "call_function" and is_view(u)]
        found.update(views)
        stack += views
    early = [node for node in graph.nodes if node in found and phase_of(node) == "forward"]
    view_anew(graph, early, lambda user: phase_of(user) == "backward")
    graph.eliminate_dead_code()
