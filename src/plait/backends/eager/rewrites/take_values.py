"""Values of other cells of a pipeline: taken from a box, so that they are let go at their last use."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from torch import Tensor
from torch.fx import Graph

from plait.compile.ir.calls import placeholders
from plait.compile.ir.node_info import NodeInfo, describe, info_of

BOX = "box"  # name of the placeholder that stands for what a stage keeps of a microbatch


def take(box: dict[str, Tensor], name: str) -> Tensor:
    """A value that nobody reads after this cell."""
    return box.pop(name)


def look(box: dict[str, Tensor], name: str) -> Tensor:
    """A value that a later cell of the stage reads too."""
    return box[name]


def take_values(graph: Graph, kept: Collection[str]) -> Graph:
    """Let a cell take what other cells hand on from a box, where it is first read. Changes `graph` and returns it.

    Values in `kept` stay in the box, for later cells of the stage.
    """
    values = [node for node in placeholders(graph) if info_of(node).kind == "value"]
    if not values:
        return graph
    with graph.inserting_before(values[0]):
        box = graph.placeholder(BOX)
    describe(box, NodeInfo(kind=BOX, name=BOX), None)
    for node in values:
        info = info_of(node)
        if node.users:
            with graph.inserting_before(min(node.users)):
                taken = graph.call_function(look if info.name in kept else take, (box, info.name))
            describe(taken, replace(info, kind="", name=""), node.meta["val"])
            node.replace_all_uses_with(taken)
        graph.erase_node(node)
    return graph
