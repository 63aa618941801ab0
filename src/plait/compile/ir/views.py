"""Which calls give a view of their first input: no memory of their own. And views that backward makes anew."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence

import torch
from torch.fx import Graph, Node

from plait.compile.ir.node_info import set_info
from plait.compile.ops import comm_ops

aten = torch.ops.aten

# The input itself: tracing leaves them behind, and they can go.
ALIASES = frozenset(
    {aten.detach.default, aten.alias.default, aten.lift_fresh.default, aten.lift_fresh_copy.default}
)  # fmt: skip
# The same numbers in the same order, in another shape: a rank's local tensor may need a copy for what was none.
RESHAPES = frozenset({aten.view.default, aten._unsafe_view.default, aten.reshape.default})
# Views that show all of what they view, each number once: what is written to one is written to the other.
WHOLE_VIEWS = RESHAPES | {
    aten.t.default, aten.transpose.int, aten.permute.default, aten.unsqueeze.default, aten.squeeze.default,
    aten.squeeze.dim, aten.squeeze.dims,
}  # fmt: skip
# All of them, also those that show a part or repeat numbers: their memory lives as long as they do.
VIEWS = WHOLE_VIEWS | {
    aten.expand.default, aten.slice.Tensor, aten.select.int, aten.split.Tensor, aten.split_with_sizes.default,
    aten.unbind.int, aten.detach.default, aten.alias.default, aten.diagonal.default, aten.unfold.default,
    aten.as_strided.default, comm_ops.in_format,
}  # fmt: skip


def is_view(node: Node) -> bool:
    """Whether the node's value lies in its input's memory. A reshape counts, though it may have to copy."""
    if node.target is operator.getitem:
        source = node.args[0]
        return isinstance(source, Node) and source.target in VIEWS
    return node.target in VIEWS


def view_anew(graph: Graph, views: Sequence[Node], late: Callable[[Node], bool]) -> set[Node]:
    """Have the readers that are `late` read views of their own, so that only what is viewed lives until then.

    The views are in the graph's order. Returns the new ones, which belong to backward.
    """
    copies: set[Node] = set()
    for view in reversed(views):  # a view before what it views
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
