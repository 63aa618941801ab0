"""What leaves a step's graph still to be summed: its terms, the axes, and which part of the sum a rank keeps."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from plait.backends.eager.collectives import all_reduce, scatter_part, take_part
from plait.compile.ir.calls import output_node
from plait.compile.ir.node_info import info_of
from plait.compile.ops.dims import HALF
from plait.compile.sharding.flat_shards import Cut

aten = torch.ops.aten


@dataclass(frozen=True)
class PendingReduction:
    """The sum of `term` over axes is output `index`; `sums` are the collectives that make it, the first one first."""

    index: int
    term: Node
    sums: tuple[Node, ...]

    @property
    def axes(self) -> tuple[str, ...]:
        return tuple(str(node.args[2]) for node in self.sums)

    @property
    def cut(self) -> Cut | None:
        """How the sum is cut of which this rank keeps its part, along the first of the axes."""
        first = self.sums[0]
        return Cut(*first.args[3]) if first.target is scatter_part else None  # type: ignore[misc]

    @property
    def sent(self) -> Node:
        """What goes on the wire: a term in half precision, where the graph widened it only to leave."""
        source = self.term.args[0] if self.term.target is aten._to_copy.default else None
        narrow = isinstance(source, Node) and source.meta["val"].dtype in HALF
        return source if narrow and len(self.term.users) == 1 else self.term  # type: ignore[return-value]


def leaving(graph: Graph, but: Collection[int] = ()) -> list[PendingReduction]:
    """Every output, but those, that is only summed before it leaves, in the order in which the terms are there."""
    end = output_node(graph)
    (results,) = end.args
    order = {node: i for i, node in enumerate(graph.nodes)}
    found: dict[Node, PendingReduction] = {}
    for index, result in enumerate(results):  # type: ignore[arg-type]
        if not isinstance(result, Node) or index in but:
            continue
        finish = finishing(result, end)
        summed, reader = (_source(finish[-1]), finish[-1]) if finish else (result, end)
        node, sums = summed, list[Node]()
        while _is_sum(node) and set(node.users) == {reader}:
            sums.append(node)
            node, reader = _source(node), node
        if sums and summed not in found:
            found[summed] = PendingReduction(index, node, tuple(reversed(sums)))
    return sorted(found.values(), key=lambda one: order[one.term])


def finishing(result: Node, reader: Node) -> list[Node]:
    """What makes an output of a sum: this rank takes its part, and adds it to the sum so far; the last call first."""
    found: list[Node] = []
    while (result.target is take_part or adds_to_sum(result)) and set(result.users) == {reader}:
        found.append(result)
        result, reader = _source(result), result
    return found


def adds_to_sum(node: Node) -> bool:
    """Whether a call adds something to the sum so far of a gradient."""
    given = node.args[0] if node.target is aten.add.Tensor else None
    return isinstance(given, Node) and given.op == "placeholder" and info_of(given).kind == "sum"


def _source(node: Node) -> Node:
    """What a sum, a part or an addition to the sum so far is made of."""
    source = node.args[1]
    assert isinstance(source, Node)
    return source


def _is_sum(node: Node) -> bool:
    return node.target is scatter_part or (node.target is all_reduce and node.args[3] == "sum")
