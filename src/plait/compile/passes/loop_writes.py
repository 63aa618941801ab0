"""Loops that write the value of each round to its slice of a tensor, as stacks of the values.

for i in range(length):
    out[:, i] = value      ->      out = torch.stack(values, 1)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from plait.compile.ir.calls import drop_dead_calls
from plait.compile.ir.node_info import describe, info_of

aten = torch.ops.aten


@dataclass
class _Writes:
    """A tensor whose slices along a dim are written one after the other, each once; `after` has the number of the write
    and the value, by position."""

    first: Node
    dim: int
    after: dict[int, tuple[int, Node]]


def stack_writes(graph: Graph, num: int) -> None:
    """Write a stack in place of writes to all `num` slices of a tensor, and let what reads a slice read the value that
    was written, or the tensor before the writes to others. Changes the graph."""
    found: dict[Node, tuple[_Writes, int]] = {}  # what a write belongs to, and its number
    for node in list(graph.nodes):
        if node.target is aten.copy.default and _form(node.args[1]) == _form(node) and _is_written(node):
            node.replace_all_uses_with(node.args[1])
        elif node.target is aten.select.int and node.args[0] in found:
            _read(node, *found[node.args[0]])
        elif node.target is aten.select_scatter.default and (written := _written(node, num)) is not None:
            tensor, value, dim, at = written
            writes, number = found.get(tensor, (_Writes(tensor, dim, {}), -1))
            if writes.dim != dim or at in writes.after or len(writes.after) > number + 1:
                writes, number = _Writes(tensor, dim, {}), -1
            writes.after[at] = number + 1, value
            found[node] = writes, number + 1
    for node, (writes, number) in found.items():
        if number == num - 1:
            with graph.inserting_before(node):
                values = [writes.after[at][1] for at in range(num)]
                made = graph.call_function(aten.stack.default, (values, writes.dim))
            describe(made, info_of(node)._replace(formats=None), node.meta["val"])
            node.replace_all_uses_with(made)
    drop_dead_calls(graph)


def _form(value: Any) -> Any:
    if not isinstance(value, Node):
        return None
    tensor = value.meta["val"]
    return tensor.shape, tensor.dtype, tensor.device


def _is_written(node: Node) -> bool:
    """Whether a value is only written to slices."""
    return all(user.target is aten.select_scatter.default and user.args[1] is node for user in node.users)


def _read(node: Node, writes: _Writes, number: int) -> None:
    """Let a call that takes a slice after so many writes take it of what it was written to, or be the value."""
    given: Any = node.args
    dim, at = given[1] % writes.first.meta["val"].ndim, given[2] % writes.first.meta["val"].shape[given[1]]
    if dim != writes.dim:
        return
    written, value = writes.after.get(at, (number + 1, node))
    if written > number:
        node.args = (writes.first, dim, at)
    elif _form(value) == _form(node):
        node.replace_all_uses_with(value)


def _written(node: Node, num: int) -> tuple[Node, Node, int, int] | None:
    """The tensor, what is written to its slice, the dim of `num` positions, and the position."""
    given: Any = node.args
    if len(given) != 4 or node.meta["val"].shape[given[2]] != num:
        return None
    tensor, value, dim, at = given
    if value.meta["val"].dtype != node.meta["val"].dtype:
        return None
    return tensor, value, dim % node.meta["val"].ndim, at % num
