"""Views and memory: whether a call returns a view of its first input, and copies of values and views."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import Graph, Node

from plait.compile.ir.calls import output_node
from plait.compile.ir.node_info import set_info
from plait.compile.ops import View, op_spec

aten = torch.ops.aten


def view_of(node: Node) -> View | None:
    """How the node's result relates to its first input; None if the result has memory of its own."""
    return op_spec(node.target).view


def is_view(node: Node) -> bool:
    """Whether the node's value is in its input's memory. A reshape counts, although it may have to copy."""
    if node.target is operator.getitem:
        source = node.args[0]
        return isinstance(source, Node) and op_spec(source.target).view is not None
    return op_spec(node.target).view is not None


def may_alias(node: Node) -> bool:
    """Whether the node's value may lie in the memory of its first tensor: a view, or this rank's part of a whole."""
    row = op_spec(node.target)
    return is_view(node) or (row.moves and row.communicates is None)


def is_whole_view(node: Node) -> bool:
    """Whether the node has each element of its input once, so that a write to one is a write to the other."""
    view = op_spec(node.target).view
    return view is not None and view.is_whole


def is_cast(node: Node) -> bool:
    """Whether the node converts its one tensor to another dtype, and does not only copy it."""
    if op_spec(node.target).copies != 0 or not isinstance(node.meta.get("val"), torch.Tensor):
        return False
    source = node.args[0]
    return isinstance(source, Node) and node.meta["val"].dtype != source.meta["val"].dtype


def is_fresh(node: Node) -> bool:
    """Whether the node's one result has memory of its own, by the op's schema."""
    return _makes_memory(node.target)


@functools.cache
def _makes_memory(op: Any) -> bool:
    if not isinstance(op, OpOverload) or op_spec(op).view is not None:
        return False
    # A composite op may return its input, whatever its schema says (conj_physical).
    composite = torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CompositeImplicitAutograd")
    returns = op._schema.returns
    return not composite and len(returns) == 1 and str(returns[0].type) == "Tensor" and returns[0].alias_info is None


def writes_in_place(node: Node) -> bool:
    """Whether the op writes its result to its first argument, which it returns."""
    return isinstance(node.target, OpOverload) and node.target._schema.is_mutable


def own_memory(graph: Graph, node: Node) -> Node:
    """Append a contiguous copy of a value, for a result that is changed in place. Returns the copy."""
    with graph.inserting_before(output_node(graph)):
        copy = graph.call_function(aten.clone.default, (node,), {"memory_format": torch.contiguous_format})
    copy.meta = {**node.meta, "val": node.meta["val"].contiguous()}
    return copy


def view_anew(graph: Graph, views: Sequence[Node], late: Callable[[Node], bool]) -> set[Node]:
    """Give the readers that are `late` copies of the views, so that only the views' bases live until then.

    The views are in the graph's order. Returns the copies, which belong to the backward pass.
    """
    copies: set[Node] = set()
    for view in reversed(views):  # a view before its base
        readers = [user for user in view.users if user in copies or late(user)]
        if not readers:
            continue
        with graph.inserting_before(min(readers)):
            copy = graph.node_copy(view)
        set_info(copy, phase="backward")
        copies.add(copy)
        for reader in readers:
            reader.replace_input_with(view, copy)
    return copies
