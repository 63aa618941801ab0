"""Write sums into an operand that nobody reads again: fewer fresh pages to touch, the same numbers.

The sums so far of gradients are such operands: a graph takes them over.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node

from plait.compile.ir.calls import is_tensor
from plait.compile.ir.node_info import info_of
from plait.compile.ir.views import is_fresh, view_of
from plait.compile.ops import View

aten = torch.ops.aten


def reuse_dead_operands(graph: Graph) -> Graph:
    """Turn `add(a, b)` into `add_(a, b)` where `a` is fresh, of the result's shape, and read here only; or into
    `add_(b, a)` where `b` is, and nothing scales it (`alpha`). A product that is added to the sum so far of a gradient
    adds to it as it is made. Changes `graph` and returns it."""
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
    """Whether nobody else can see the operand's memory and it has the result's form."""
    if _is_sum_so_far(operand):
        return True
    result, value = node.meta["val"], operand.meta["val"]
    if (value.shape, value.dtype, value.stride()) != (result.shape, result.dtype, result.stride()):
        return False
    while view_of(operand) is View.RESHAPE and len(operand.users) == 1:
        operand = operand.args[0]  # type: ignore[assignment]
    return is_fresh(operand) and len(operand.users) == 1


def _is_sum_so_far(operand: Any) -> bool:
    """Whether this is what earlier microbatches have added up of a gradient, and the only reader of it asks."""
    is_sum = isinstance(operand, Node) and operand.op == "placeholder" and info_of(operand).kind == "sum"
    return is_sum and len(operand.users) == 1
