"""Questions about fx nodes and graphs: their calls, as op rules take them, views and memory, and copies of both."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import Graph, Node
from torch.fx.node import Target, map_arg

from plait.compile.ir.node_info import set_info
from plait.compile.ops import Call, OpSpec, TensorSpec, View, op_spec
from plait.compile.ops.base import Args


def is_tensor(node: Node) -> bool:
    """Whether the node's value is a single tensor."""
    return isinstance(node.meta.get("val"), torch.Tensor)


def tensor_inputs(node: Node) -> list[Node]:
    """The tensor inputs of a node, in the order of args then kwargs; one that is passed twice is listed twice."""
    found: list[Node] = []

    def add(arg: Node) -> Node:
        if is_tensor(arg):
            found.append(arg)
        return arg

    map_arg(node.args, add)
    map_arg(node.kwargs, add)
    return found


def output_values(node: Node) -> tuple[Any, ...]:
    """The outputs of a node: its one value, or the items of a tuple."""
    value = node.meta.get("val")
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


def call_of(node: Node) -> Call:
    """The call of a node as op rules take it: tensors are replaced by their shapes and dtypes."""
    inputs: list[TensorSpec] = []

    def to_spec(arg: Node) -> Any:
        if not is_tensor(arg):
            return arg
        value = arg.meta["val"]
        spec = TensorSpec(tuple(value.shape), value.dtype, len(inputs))
        inputs.append(spec)
        return spec

    args = map_arg(node.args, to_spec)
    kwargs = map_arg(node.kwargs, to_spec)
    outputs = tuple(
        TensorSpec(tuple(v.shape), v.dtype, i) if isinstance(v, torch.Tensor) else None
        for i, v in enumerate(output_values(node))
    )
    return Call(node.target, tuple(args), dict(kwargs), tuple(inputs), outputs)


def op_spec_of(node: Node) -> OpSpec:
    """The row of the op that the node calls; if there is none, a row that is not `known`."""
    return op_spec(node.target)


def is_item(node: Node) -> bool:
    """Whether the node only picks one output of another node."""
    return node.op == "call_function" and node.target is operator.getitem


def num_bytes(value: torch.Tensor) -> int:
    """The number of bytes of a tensor's elements."""
    return value.numel() * value.element_size()


def placeholders(graph: Graph) -> list[Node]:
    """The inputs of a graph, in order."""
    return [node for node in graph.nodes if node.op == "placeholder"]


def output_node(graph: Graph) -> Node:
    """The node that returns the results of a graph."""
    return next(node for node in reversed(graph.nodes) if node.op == "output")  # type: ignore[no-any-return]


def settled(node: Node) -> Node:
    """The node after which calls that read `node` may be inserted: the last of its group of placeholders, or `node`."""
    while node.op == "placeholder" and node.next.op == "placeholder":
        node = node.next
    return node


def device_type(graph: Graph) -> str:
    """The type of device that a graph's tensors are on; cpu without any."""
    values = (value for node in graph.nodes for value in output_values(node))
    return next((value.device.type for value in values if isinstance(value, torch.Tensor)), "cpu")


def append_call(graph: Graph, op: Target, args: Args, kwargs: Mapping[str, Any], name: str = "") -> Node:
    """Append a call to a graph, as `graph.call_function`.

    The arguments are set after the node is made. If they are given to the constructor, fx searches them for symbolic
    sizes, which no graph of plait has, and that doubles the time.
    """
    node = graph.create_node("call_function", op, name=name or None)
    node.args = args
    if kwargs:
        node.kwargs = dict(kwargs)
    return node


def copy_graph(graph: Graph) -> Graph:
    """A copy whose nodes share their NodeInfo and values with the original's."""
    copy = Graph()
    copies: dict[Node, Node] = {}
    of = copies.__getitem__
    for node in graph.nodes:
        if node.op == "output":
            made = copy.output(map_arg(node.args[0], of))
        elif node.op == "call_function":
            made = append_call(copy, node.target, map_arg(node.args, of), map_arg(node.kwargs, of), node.name)
        else:
            made = copy.node_copy(node, of)
        made.meta.update(node.meta)
        copies[node] = made
    return copy


def drop_dead_calls(graph: Graph) -> None:
    """Erase the calls without readers and without side effects."""
    for node in reversed(graph.nodes):
        if not node.users and node.op not in ("placeholder", "output") and not _has_effect(node):
            graph.erase_node(node)


_effects: dict[OpOverload, bool] = {}  # by op


def _has_effect(node: Node) -> bool:
    if not isinstance(node.target, torch._ops.OpOverload):
        return node.is_impure()
    if node.target not in _effects:
        _effects[node.target] = node.is_impure()
    return _effects[node.target]


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
def _makes_memory(op: Target) -> bool:
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
