"""What leaves a step's graph still to be summed: its terms, the axes, and which part of the sum a rank keeps."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from plait.compile.ir.calls import output_node
from plait.compile.ops import comm_ops
from plait.compile.ops.dims import HALF
from plait.compile.sharding.flat_shards import Cut

aten = torch.ops.aten


@dataclass(frozen=True)
class PendingReduction:
    """The sum over `axes` of `term` is output `index`; `sums` are the all-reduces that make it, the first one first.

    With a cut, this rank keeps its part along the axis that then comes first.
    """

    index: int
    term: Node
    axes: tuple[str, ...]
    sums: tuple[Node, ...]
    cut: Cut | None = None

    @property
    def sent(self) -> Node:
        """What goes on the wire: a term in half precision, where the graph widened it only to leave."""
        source = self.term.args[0] if self.term.target is aten._to_copy.default else None
        narrow = isinstance(source, Node) and source.meta["val"].dtype in HALF
        return source if narrow and len(self.term.users) == 1 else self.term  # type: ignore[return-value]


def leaving(graph: Graph, cuts: Mapping[int, Cut], over: str, but: Collection[int] = ()) -> list[PendingReduction]:
    """Every output, but those, that is only summed before it leaves, in the order in which the terms are there. Of
    those in `cuts` this rank keeps its part along the axis `over`."""
    end = output_node(graph)
    (results,) = end.args
    order = {node: i for i, node in enumerate(graph.nodes)}
    found: dict[Node, PendingReduction] = {}
    for index, result in enumerate(results):  # type: ignore[arg-type]
        if not isinstance(result, Node) or result in found or index in but:
            continue
        node, reader, sums = result, end, []
        while node.target is comm_ops.all_reduce and node.args[3] == "sum" and set(node.users) == {reader}:
            sums.append(node)
            node, reader = node.args[1], node  # type: ignore[assignment]
        if not sums:
            continue
        axes = tuple(str(s.args[2]) for s in reversed(sums))
        cut = cuts.get(index) if over in axes else None
        if cut is not None:
            axes = (over, *(axis for axis in axes if axis != over))
        found[result] = PendingReduction(index, node, axes, tuple(reversed(sums)), cut)
    return sorted(found.values(), key=lambda one: order[one.term])
