"""Memory formats: ops that depend on the strides of their inputs get inputs in the formats that they had at capture.

On a rank the strides of a tensor may differ from those on one device, because it was sent to another stage, gathered,
sharded, read from disk or computed by another kernel. Most kernels follow the strides of their inputs. For the few that
do not (`formats` of their OpSpec), every input is converted to its format at capture.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from plait.compile.ir.calls import is_tensor, op_spec_of
from plait.compile.ir.node_info import NodeInfo, describe, info_of, set_info
from plait.compile.ops import View, comm_ops
from plait.compile.sharding.decompose import decompose_node
from plait.errors import CaptureError

aten = torch.ops.aten


@dataclass(frozen=True)
class Format:
    """How a tensor lies in memory.

    Attributes:
        order: its dims by stride, the largest first.
        dense: whether there are no gaps and repeated elements.
        multiple: what divides all strides but the last, of a kernel that depends on it.
        repeats: whether dims of stride 0, which do not count otherwise, may stay so.
    """

    order: tuple[int, ...]
    dense: bool
    multiple: int = 1
    repeats: bool = False


_ALIGNMENT = 16  # bytes that a GPU reads at once


def format_of(tensor: torch.Tensor, strided: bool = False) -> Format:
    """The format of a tensor; that of a contiguous tensor if elements repeat or the smallest stride is not 1.

    With `strided` (see OpSpec) the format of a tensor whose elements repeat is that of one that has them once.
    """
    shape, strides = tensor.shape, tensor.stride()
    if strided:  # dims that repeat are outermost
        shape = torch.Size([1 if step == 0 else n for n, step in zip(shape, strides, strict=True)])
        strides = tuple([step or tensor.numel() for step in strides])
    order = tuple(sorted(range(len(shape)), key=[-step for step in strides].__getitem__))
    if _is_dense([(shape[d], strides[d]) for d in order]):
        return Format(order, dense=True, repeats=strided)
    steps = [step for n, step in zip(shape, strides, strict=True) if n > 1]
    if min(steps) != 1:
        return Format(tuple(range(tensor.ndim)), dense=True, repeats=strided)
    wide = math.gcd(_ALIGNMENT // tensor.element_size(), *(step for step in steps if step != 1)) if strided else 1
    return Format(order, dense=False, multiple=wide, repeats=strided)


def _is_dense(dims: list[tuple[int, int]]) -> bool:
    """Whether a tensor with dims of these (size, stride), in this order, is contiguous."""
    expected = 1
    for n, step in reversed(dims):
        if n != 1 and step != expected:
            return any(n == 0 for n, _ in dims)
        expected *= n
    return True


def note_formats(graph: Graph, several: bool) -> Graph:
    """Record the formats of the inputs of every call whose kernel depends on them. Changes the captured graph.

    Views that depend on strides are rewritten as ops on elements.

    Raises:
        CaptureError: with `several` ranks, as_strided reads a tensor whose memory has gaps.
    """
    node = next(iter(graph.nodes))
    while node.op != "output":
        following = node.next
        if op_spec_of(node).reads == "memory":  # rewritten by ops on elements
            following = _decompose(node, several)
        elif node.op == "call_function":
            _note(node)
        node = following
    for node in graph.nodes:
        _reshape(node)
    return graph


def _reshape(node: Node) -> None:
    if op_spec_of(node).view is View.RESHAPE:
        node.target, node.args = aten.reshape.default, node.args[:2]  # the third argument of _reshape_alias is strides


def _decompose(node: Node, several: bool) -> Node:
    rule = op_spec_of(node)
    assert rule.decompose is not None
    following = node.next
    try:
        decompose_node(node, rule.decompose)
    except CaptureError:
        if several:
            raise
    return following


def _note(node: Node) -> None:
    rule = op_spec_of(node)
    if not hasattr(node.target, "_schema"):
        return  # plait's own calls, and getitem
    if not rule.known or rule.formats:
        given = [*enumerate(node.args), *node.kwargs.items()]
        tensors = [(place, value) for place, value in given if isinstance(value, Node) and is_tensor(value)]
        formats = {p: format_of(v.meta["val"], rule.strided) for p, v in tensors if v.meta["val"].ndim > 1}
        set_info(node, formats=(node.target, formats))


def keep_formats(graph: Graph) -> Graph:
    """Convert inputs to the formats that `note_formats` has recorded. Changes a local graph and returns it.

    Views that rules have written become reshapes, which copy if they must.
    """
    made: dict[tuple[Node, Format], Node] = {}

    def converted(node: Node, value: object, wanted: Format | None) -> Any:
        if wanted is None or not isinstance(value, Node) or value.meta["val"].ndim != len(wanted.order):
            return value
        if (value, wanted) not in made:
            how = (wanted.order, wanted.dense, wanted.multiple, wanted.repeats)
            with graph.inserting_before(node):
                new = made[value, wanted] = graph.call_function(comm_ops.in_format, (value, *how))
            read, made_as = info_of(node), info_of(value)
            info = NodeInfo(
                module=read.module, phase=read.phase, position=read.position, stage=read.stage, role=read.role,
                owner=made_as.owner, global_shape=made_as.global_shape, placements=made_as.placements,
            )  # fmt: skip
            describe(new, info, comm_ops.in_format(value.meta["val"], *how))
        return made[value, wanted]

    for node in list(graph.nodes):
        _reshape(node)
        target, formats = info_of(node).formats or (None, {})
        if target is node.target and node.op == "call_function":
            node.args = tuple(converted(node, value, formats.get(place)) for place, value in enumerate(node.args))
            node.kwargs = {name: converted(node, value, formats.get(name)) for name, value in node.kwargs.items()}
    return graph
