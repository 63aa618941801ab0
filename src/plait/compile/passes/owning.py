"""Gradients in memory of their own: what updates one in place must not change another, nor the batch."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.fx import Graph, Node

from plait.compile.ir.calls import output_node
from plait.compile.ir.views import is_whole_view

aten = torch.ops.aten


def own_gradients(graph: Graph, gradients: Iterable[int]) -> Graph:
    """Copy those of the outputs that repeat numbers, or share them with an earlier one or an input. Changes `graph`.

    Two parameters that are added up have one gradient, of which each is to have its own.
    """
    end = output_node(graph)
    results = list(end.args[0])  # type: ignore[arg-type]
    seen: set[Node] = set()
    for index in gradients:
        node = base = results[index]
        while is_whole_view(base):
            base = base.args[0]
        if base in seen or base.op == "placeholder" or base.target is aten.expand.default:
            with graph.inserting_before(end):
                copy = graph.call_function(aten.clone.default, (node,), {"memory_format": torch.contiguous_format})
            copy.meta = dict(node.meta)
            copy.meta["val"] = node.meta["val"].contiguous()
            results[index] = copy
        seen.add(base)
    end.args = (tuple(results),)
    return graph
