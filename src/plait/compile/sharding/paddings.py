"""Convolutions of stride 1 as single calls with the padding before them and the slices after them.

A causal convolution makes more positions than it has, which an axis that cuts the sequence would not divide: of a
sequence padded on the left, or of all positions of a result of which the first are taken. Such a call in one piece
(compile/ops/padded_conv.py) has as many positions as its input.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from plait.compile.ir.calls import is_item
from plait.compile.ir.node_info import describe, info_of
from plait.compile.ops.padded_conv import padded_convolution, padded_convolution_backward
from plait.compile.sharding.decompose import decompose_node

aten = torch.ops.aten


def join_paddings(graph: Graph) -> None:
    """Replace convolutions of stride 1 by padded ones. Changes the graph, whose ops are those of ATen."""
    for node in list(graph.nodes):
        if node.target is aten.convolution.default:
            _join_forward(node)
        elif node.target is aten.convolution_backward.default:
            _join_backward(node)
    graph.eliminate_dead_code()


def write_paddings(graph: Graph) -> None:
    """Write padded convolutions as ops of ATen. Changes the graph."""
    for node in list(graph.nodes):
        if node.target in (padded_convolution, padded_convolution_backward):
            decompose_node(node, node.target)


@dataclass
class _Pads:
    """The widths of zeros around the input of a convolution, as constant_pad_nd takes them."""

    source: Node
    widths: list[int]
    joined: tuple[int, ...] = ()  # those of a call of constant_pad_nd that they include

    def take(self, num_dims: int, dim: int, start: int, left: int) -> None:
        """Leave out so many positions of the result, at the start and at the end of a dim."""
        at = 2 * (num_dims - 1 - dim)
        self.widths[at] -= start
        self.widths[at + 1] -= left


def _pads(x: Node, padding: Sequence[int]) -> _Pads:
    """The widths around the input x of a convolution, with those of a call that pads it with zeros."""
    alone = _Pads(x, [n for each in reversed(padding) for n in (each, each)])
    if x.target is not aten.constant_pad_nd.default or (len(x.args) > 2 and x.args[2] != 0):
        return alone
    given: Any = x.args
    source, widths, *_ = given
    if len(widths) > len(alone.widths):
        return alone
    joined = _for_all(widths, len(alone.widths))
    return _Pads(source, [a + b for a, b in zip(alone.widths, joined, strict=True)], joined)


def _for_all(widths: Any, num: int) -> tuple[int, ...]:
    """The widths that constant_pad_nd is given, of all `num` ends."""
    return (*widths, *[0] * (num - len(widths)))


def _is_plain(stride: Sequence[int], transposed: object) -> bool:
    return not transposed and all(step == 1 for step in stride)


def _join_forward(node: Node) -> None:
    given: Any = node.args
    x, weight, bias, stride, padding, dilation, transposed, _, groups = given
    if not _is_plain(stride, transposed):
        return
    pads = _pads(x, padding)
    value, num_dims = node.meta["val"], node.meta["val"].ndim
    taken = {_span(user, num_dims, user.args[1:]) if user.target is aten.slice.Tensor else None for user in node.users}
    (span,) = taken if len(taken) == 1 else (None,)
    users = [node]
    if span is not None:
        pads.take(num_dims, *span)
        users = list(node.users)
        value = users[0].meta["val"]
    with node.graph.inserting_before(node):
        made = node.graph.call_function(
            padded_convolution, (pads.source, weight, bias, pads.widths, dilation, groups)
        )  # fmt: skip
    describe(made, info_of(node), value)
    for user in users:
        user.replace_all_uses_with(made)


def _span(node: Node, num_dims: int, args: tuple[Any, ...]) -> tuple[int, int, int] | None:
    """(dim, positions left out at the start, at the end) of a slice of a spatial dim; `args` are its own (dim, start,
    end, step)."""
    defaults: tuple[Any, ...] = (0, None, None, 1)
    dim, start, end, step = args + defaults[len(args) :]
    dim %= num_dims
    given: Any = node.args
    length = given[0].meta["val"].shape[dim] if node.target is aten.slice.Tensor else given[1][dim]
    first, last, step = slice(start, end, step).indices(length)
    return (dim, first, length - last) if dim >= 2 and step == 1 and first < last else None


def _join_backward(node: Node) -> None:
    given: Any = node.args
    grad, x, weight, sizes, stride, padding, dilation, transposed, _, groups, mask = given
    if not _is_plain(stride, transposed):
        return
    pads, num_dims = _pads(x, padding), x.meta["val"].ndim
    items = {user.args[1]: user for user in node.users if is_item(user)}
    unpadded = list(items[0].users) if 0 in items else []
    if pads.joined and not all(_undoes(user, pads.joined) for user in unpadded):
        pads, unpadded = _Pads(x, [n for each in reversed(padding) for n in (each, each)]), []
    if grad.target is aten.slice_backward.default:
        span = _span(grad, num_dims, grad.args[2:])
        if span is not None:
            pads.take(num_dims, *span)
            grad = grad.args[0]
    with node.graph.inserting_before(node):
        made = node.graph.call_function(
            padded_convolution_backward, (grad, pads.source, weight, sizes, pads.widths, dilation, groups, mask)
        )
    dx, *rest = node.meta["val"]
    dx = None if dx is None else pads.source.meta["val"]
    describe(made, info_of(node), (dx, *rest))
    node.replace_all_uses_with(made)
    for user in unpadded if pads.joined else ():
        items[0].meta["val"] = dx
        user.replace_all_uses_with(items[0])


def _undoes(user: Node, joined: tuple[int, ...]) -> bool:
    """Whether a call takes those positions away again that padding has added."""
    if user.target is not aten.constant_pad_nd.default:
        return False
    given: Any = user.args
    return tuple(-n for n in _for_all(given[1], len(joined))) == joined
