"""Rewrites a captured graph so that each of its ops has a lowering: what has none is written by simpler ops.

How an op is written is said by its row in compile/ops, or by PyTorch's own table of decompositions.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

from torch._decomp import decomposition_table
from torch.fx import Graph, Node

from plait.backends.xla.lowerings import LOWERINGS
from plait.compile.ir.calls import copy_graph, op_spec_of
from plait.compile.ir.node_info import info_of
from plait.compile.ops.comm_ops import constrain
from plait.compile.ops.draw import draw
from plait.compile.sharding.decompose import decompose_node
from plait.errors import PlanError, Refusal


def simplified(graph: Graph) -> Graph:
    """A copy of the graph in which every call has a lowering.

    Raises PlanError, which names the op and its module, for an op that neither has one nor is written by ops that do.
    """
    copy = copy_graph(graph)
    node: Node = next(iter(copy.nodes))
    while node.op != "output":
        if node.op != "call_function" or is_lowered(node.target):
            node = node.next
            continue
        function = _by_simpler(node)
        if function is None:
            refusal = no_lowering(node)
            raise PlanError(refusal)
        try:
            node = decompose_node(node, function)
        except Exception as error:
            refusal = no_lowering(node)
            raise PlanError(refusal) from error
    copy.eliminate_dead_code()
    return copy


def is_lowered(op: Any) -> bool:
    """Whether the op has a lowering, or is handled by who runs the graph."""
    return op in LOWERINGS or op in (operator.getitem, draw, constrain)


def _by_simpler(node: Node) -> Callable[..., Any] | None:
    """A function that computes the op by others; None if there is none."""
    written = op_spec_of(node).decompose
    return written if written is not None else _of_torch(node.target)


@functools.cache
def _of_torch(op: Any) -> Callable[..., Any] | None:
    function = decomposition_table.get(op)
    if function is None:
        return None

    def written(*args: Any, **kwargs: Any) -> Any:
        return function(*map(_own, args), **{key: _own(value) for key, value in kwargs.items()})

    return written


def _own(value: Any) -> Any:
    """A list of a graph as one that may be changed, as some of these functions do."""
    return [_own(each) for each in value] if isinstance(value, list) else value


def no_lowering(node: Node, why: str = "") -> Refusal:
    """The refusal of an op that has no lowering, and that no simpler ops replace; `why` says more about the op."""
    where = info_of(node).module
    what = f"backend=xla has no lowering for the op {node.target}{f' {why}' if why else ''}"
    what += f", which {where} calls" if where else ", which the model or the loss calls"
    return Refusal(what, "", "write the module with other ops, or leave backend=xla out")
