"""What passes that rewrite a graph share: new calls with values of their own, and the order of a value's elements."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from plait.compile.ir.calls import call_of, is_tensor, op_spec_of, tensor_inputs
from plait.compile.ir.node_info import describe, info_of
from plait.compile.ops import View

aten = torch.ops.aten


def write(like: Node, op: Callable[..., Any], *args: Any, **kwargs: Any) -> Node:
    """A new call where the graph inserts. It belongs to what `like` belongs to, and has its value worked out."""
    node = like.graph.call_function(op, args, kwargs)
    value = evaluate(op, args, kwargs)
    describe(node, replace(info_of(like), formats=None), value)
    return node


def evaluate(op: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The value of a call: fake tensors like those of the nodes among its arguments."""
    modes: list[Any] = []

    def value(node: Node) -> Any:
        found = node.meta["val"]
        modes.append(found.fake_mode if isinstance(found, torch.Tensor) else found[0].fake_mode)
        return found

    given = map_arg((tuple(args), kwargs), value)
    with modes[0], torch.no_grad():
        return op(*given[0], **given[1])


def same_order(node: Node) -> Node | None:
    """The one tensor of which the node's value has all elements in the same order, in any shape; None if there is
    none."""
    row = op_spec_of(node)
    if node.op != "call_function" or not is_tensor(node) or (row.view is None and row.copies != 0):
        return None
    inputs = tensor_inputs(node)
    if len(inputs) != 1 or any(_kind(source) != _kind(node) for source in inputs):
        return None
    if row.view in (View.RESHAPE, View.ALIAS) or row.copies == 0:
        return inputs[0]
    shape, sources = inputs[0].meta["val"].shape, dims_from(node)
    kept = [source for source, n in zip(sources, node.meta["val"].shape, strict=True) if n > 1]
    return inputs[0] if kept == [d for d, n in enumerate(shape) if n > 1] else None


def _kind(node: Node) -> tuple[Any, ...]:
    value = node.meta["val"]
    return value.dtype, value.device, value.numel()


def dims_from(node: Node) -> list[int | None]:
    """For each dim of a view of one tensor, the dim of the tensor that it is; None for one that it does not have, and
    for all of them if the op's row does not say."""
    factors = op_spec_of(node).factors(call_of(node))
    found = {factor.outputs[0]: factor.inputs[0] for factor in factors}
    return [found.get(d) for d in range(node.meta["val"].ndim)]


def in_shape(node: Node, shape: Sequence[int]) -> Node:
    """The elements of a value, in their order, in another shape: an earlier value that has it, or a view."""
    source: Node | None = node
    while source is not None:
        if tuple(source.meta["val"].shape) == tuple(shape):
            return source
        source = same_order(source)
    return write(node, aten.reshape.default, node, list(shape))


def root_of(node: Node) -> Node:
    """The first value that has all elements of the node's value in the same order."""
    while (source := same_order(node)) is not None:
        node = source
    return node


def take_place(node: Node, value: Node) -> None:
    """Let the readers of a node read `value`, which has its elements in the same order, perhaps in another shape.

    Readers that only bring it into another shape go. Insert after `value` and before all readers."""
    for user in list(node.users):
        if same_order(user) is node:
            if user.meta["val"].shape == value.meta["val"].shape:
                user.replace_all_uses_with(value)
            else:
                take_place(user, value)
    if any(user.users or user.op == "output" for user in node.users):
        node.replace_all_uses_with(in_shape(value, node.meta["val"].shape))
