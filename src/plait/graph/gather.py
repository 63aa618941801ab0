"""Parameters that each rank holds a part of: gathered before their use, let go after it (ZeRO-3, FSDP).

Parameters that are read one after the other are gathered in buckets. A bucket leaves one bucket ahead of its first
reader, and is waited for there; the whole tensors live until their last reader, and backward gathers them anew
(Rajbhandari et al. 2020, "ZeRO"; Zhao et al. 2023, "PyTorch FSDP"). A parameter that is only read in half precision
travels in half precision.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from plait.decide.buckets import bucket_limit, split_buckets
from plait.graph.calls import num_bytes, placeholders
from plait.graph.partition import WORLD
from plait.graph.rows import Cut, PlainRows, Rows, rows_of
from plait.graph.views import is_view

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
        self._work = comm.all_gather(row, take=self._take)

    def _take(self, rank: int, row: Tensor) -> None:
        if not self._wholes:
            self._wholes = [
                self._like.new_empty(cut.shape, dtype=dtype)
                for cut, dtype in zip(self._rows.cuts, self._dtypes, strict=True)
            ]
        self._rows.take(row, rank, self._wholes)

    def wait(self) -> list[Tensor]:
        self._work.wait()
        wholes, self._wholes = self._wholes, []
        return wholes


def gather_start(world: Any, axis: str, plain: PlainRows, dtypes: tuple[torch.dtype, ...], *parts: Tensor) -> Gathering:
    """Begin to put together the whole tensors of which every rank has a part."""
    return Gathering(world.comm(axis), plain, tuple(dtypes), parts)


def gather_wait(work: Gathering) -> list[Tensor]:
    return work.wait()


def gather_parameters(graph: Graph, cuts: Mapping[str, Cut], bucket_bytes: int) -> Graph:
    """Let the placeholders that `cuts` names stand for this rank's part. Changes `graph` and returns it."""
    held = [node for node in placeholders(graph) if node.meta.get("name") in cuts]
    if not held:
        return graph
    narrow_parameters(held)
    repeat_views(graph, held)
    world = next(node for node in graph.nodes if node.name == WORLD)
    order = {node: i for i, node in enumerate(graph.nodes)}
    dtypes = {node: node.meta["val"].dtype for node in held}
    for phase in ("forward", "backward"):
        first = {}
        for node in held:
            users = [u for u in node.users if _phase(u) == phase]
            if users:
                first[node] = min(users, key=order.__getitem__)
        groups: dict[torch.dtype, list[Node]] = {}
        for node in sorted(first, key=lambda n: order[first[n]]):
            groups.setdefault(dtypes[node], []).append(node)
        for members in groups.values():
            sizes = [num_bytes(n.meta["val"]) for n in members]
            limit = bucket_limit(sum(sizes), bucket_bytes)
            buckets = [[members[i] for i in b] for b in split_buckets(sizes, limit, limit)]
            _place(graph, world, buckets, first, phase, cuts)
    for node in held:
        cut = cuts[node.meta["name"]]
        node.meta["val"] = node.meta["val"].new_empty(cut.part_shape(0), dtype=node.meta.get("held", dtypes[node]))
    graph.lint()
    return graph


def narrow_parameters(held: list[Node]) -> None:
    """Where every reader of a parameter first casts it to one narrower type, let it come in that type.

    Its placeholder then stands for the narrow tensor; `held` in its meta is the type that the optimizer has.
    """
    for node in held:
        casts = list(node.users)
        dtypes = {u.meta["val"].dtype for u in casts if u.target is aten._to_copy.default}
        if not casts or any(u.target is not aten._to_copy.default for u in casts) or len(dtypes) != 1:
            continue
        (dtype,) = dtypes
        value = node.meta["val"]
        if dtype.itemsize >= value.dtype.itemsize:
            continue
        node.meta["held"] = value.dtype
        node.meta["val"] = value.new_empty(value.shape, dtype=dtype)
        for cast in casts:
            cast.replace_all_uses_with(node)
            cast.graph.erase_node(cast)


def _phase(node: Node) -> str:
    return "forward" if node.meta.get("phase") == "forward" else "backward"


def repeat_views(graph: Graph, held: list[Node]) -> None:
    """Views of a parameter that both phases read: backward makes its own, so that forward's memory can go."""
    views: list[Node] = []
    stack = list(held)
    while stack:
        found = [u for u in stack.pop().users if u.op == "call_function" and is_view(u)]
        views += found
        stack += found
    order = {node: i for i, node in enumerate(graph.nodes)}
    for view in sorted(set(views), key=order.__getitem__, reverse=True):  # a view before what it views
        readers = [u for u in view.users if _phase(u) == "backward"]
        if _phase(view) == "backward" or not readers:
            continue
        reader = min(readers)
        with graph.inserting_before(reader):
            copy = graph.node_copy(view)
        copy.meta = {**view.meta, "phase": "backward"}
        for each in readers:
            each.replace_input_with(view, copy)
    graph.eliminate_dead_code()


def _place(
    graph: Graph,
    world: Node,
    buckets: list[list[Node]],
    first: Mapping[Node, Node],
    phase: str,
    cuts: Mapping[str, Cut],
) -> None:
    ahead: Node | None = None  # the first reader of the bucket before
    for members in buckets:
        reader = first[members[0]]
        rows = Rows(tuple(cuts[n.meta["name"]] for n in members))
        values = [n.meta["val"] for n in members]
        dtypes = tuple(v.dtype for v in values)
        meta = {"phase": phase, "module": reader.meta.get("module", ""), "origin": "zero=3"}
        with graph.inserting_before(ahead or reader):
            start = graph.call_function(gather_start, (world, "data", rows.plain, dtypes, *members))
            held = rows.length * values[0].element_size()
            start.meta = {**meta, "val": None, "bytes": held, "what": f"{len(members)} parameters"}
        with graph.inserting_before(reader):
            done = graph.call_function(gather_wait, (start,))
            done.meta = {**meta, "val": values}
            for index, node in enumerate(members):
                whole = graph.call_function(operator.getitem, (done, index))
                whole.meta = {**node.meta, **meta, "val": values[index]}
                node.replace_all_uses_with(
                    whole, delete_user_cb=lambda u, whole=whole: u.target is not gather_start and _phase(u) == phase
                )
        ahead = reader
