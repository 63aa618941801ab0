"""Reuses or frees the memory of values that nothing reads again. The numbers stay the same.

A sum is written into an operand that is dead after it, so that no fresh pages are touched. The sum so far of a gradient
is such an operand, which the graph owns. A value that another cell of a pipeline saved is removed from the saved values
by its last reader.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from plait.compile.ir.calls import is_fresh, is_tensor, placeholders, view_of
from plait.compile.ir.node_info import NodeInfo, describe, info_of
from plait.compile.ops import View

aten = torch.ops.aten
SAVED = "saved"  # name of the placeholder of the saved values
SavedValues = dict[str, Tensor]  # what a stage of a pipeline saves of one microbatch for later cells, by name


def reuse_dead_operands(graph: Graph) -> Graph:
    """Turn `add(a, b)` into `add_(a, b)` if `a` is fresh memory of the result's shape and read only here; or into
    `add_(b, a)` if that holds of `b`, and `b` is not scaled by `alpha`. An `addmm` to the sum so far of a gradient
    becomes `addmm_`. Changes `graph` and returns it."""
    for node in graph.nodes:
        if node.target is aten.addmm.default and _is_sum_so_far(node.args[0]):
            node.target = aten.addmm_.default
        if node.target is not aten.add.Tensor or len(node.args) != 2 or not all(isinstance(a, Node) for a in node.args):
            continue
        first, second = node.args
        assert isinstance(first, Node) and isinstance(second, Node)
        if first is second or not (is_tensor(first) and is_tensor(second)):
            continue
        if _reusable(first, node):
            node.target = aten.add_.Tensor
        elif not node.kwargs and _reusable(second, node):
            node.target = aten.add_.Tensor
            node.args = (second, first)
    return graph


def _reusable(operand: Node, node: Node) -> bool:
    """Whether the operand has the result's shape, dtype and strides, and nothing else reads its memory."""
    if _is_sum_so_far(operand):
        return True
    result, value = node.meta["val"], operand.meta["val"]
    if (value.shape, value.dtype, value.stride()) != (result.shape, result.dtype, result.stride()):
        return False
    while view_of(operand) is View.RESHAPE and len(operand.users) == 1:
        operand = operand.args[0]  # type: ignore[assignment]
    return is_fresh(operand) and len(operand.users) == 1


def _is_sum_so_far(operand: Any) -> bool:
    """Whether the operand is the sum of a gradient over earlier microbatches, with one reader."""
    is_sum = isinstance(operand, Node) and operand.op == "placeholder" and info_of(operand).kind == "sum"
    return is_sum and len(operand.users) == 1


SAVED = "saved"  # name of the placeholder that stands for what a stage keeps of a microbatch


def pop_saved(saved: dict[str, Tensor], name: str) -> Tensor:
    """The value, which no later cell reads."""
    return saved.pop(name)


def read_saved(saved: dict[str, Tensor], name: str) -> Tensor:
    """The value, which a later cell of the stage reads too."""
    return saved[name]


def pop_dead_values(graph: Graph, kept: Collection[str]) -> Graph:
    """Have a cell take the values of other cells from the saved values, each where it is first read.

    Values in `kept` stay saved for later cells of the stage. Changes `graph` and returns it.
    """
    values = [node for node in placeholders(graph) if info_of(node).kind == "value"]
    if not values:
        return graph
    with graph.inserting_before(values[0]):
        saved = graph.placeholder(SAVED)
    describe(saved, NodeInfo(kind=SAVED, name=SAVED), None)
    for node in values:
        info = info_of(node)
        if node.users:
            with graph.inserting_before(min(node.users)):
                taken = graph.call_function(read_saved if info.name in kept else pop_saved, (saved, info.name))
            describe(taken, info._replace(kind="", name=""), node.meta["val"])
            node.replace_all_uses_with(taken)
        graph.erase_node(node)
    return graph
