"""Parameters that each rank holds a part of: gathered before their use, let go after it (ZeRO-3, FSDP).

The whole tensor lives until its last reader in a phase, and backward gathers it anew (Rajbhandari et al. 2020, "ZeRO";
Zhao et al. 2023, "PyTorch FSDP"). A parameter that is only read in half precision travels in half precision.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch.fx import Graph, Node

from plait.compile.ir.calls import placeholders
from plait.compile.ir.node_info import describe, info_of, phase_of, set_info
from plait.compile.ir.views import is_view, view_anew
from plait.compile.ops import comm_ops
from plait.compile.sharding.flat_shards import Cut

aten = torch.ops.aten


def gather_parameters(graph: Graph, cuts: Mapping[str, Cut], axis: str) -> Graph:
    """Let the placeholders that `cuts` names stand for this rank's part along `axis`. Changes and returns `graph`."""
    held = [node for node in placeholders(graph) if info_of(node).name in cuts]
    if not held:
        return graph
    narrow_parameters(held)
    repeat_views(graph, held)
    for node in held:
        whole, info, cut = node.meta["val"], info_of(node), cuts[info_of(node).name]
        dtype = info.stored_dtype or whole.dtype
        part = node.meta["val"] = whole.new_empty(cut.part_shape(0), dtype=dtype)
        for readers in (readers_in(phase, [node]).get(node, []) for phase in ("forward", "backward")):
            if not readers:
                continue
            first = min(readers)
            made = replace(info, phase=phase_of(first), module=info_of(first).module, origin="zero=3")
            with graph.inserting_before(first):
                sent = node
                if dtype != whole.dtype:
                    sent = graph.call_function(aten._to_copy.default, (node,), {"dtype": whole.dtype})
                    describe(sent, made, part.new_empty(part.shape, dtype=whole.dtype))
                gathered = graph.call_function(comm_ops.gather_part, (sent, axis, cut.plain))
            describe(gathered, made, whole)
            for reader in readers:
                reader.replace_input_with(node, gathered)
    graph.lint()
    return graph


def readers_in(phase: str, nodes: Sequence[Node]) -> dict[Node, list[Node]]:
    """The calls of one phase that read each node; nodes that none reads are left out."""
    found = {node: [u for u in node.users if u.op != "output" and phase_of(u) == phase] for node in nodes}
    return {node: users for node, users in found.items() if users}


def narrow_parameters(held: list[Node]) -> None:
    """Where every reader of a parameter first casts it to one narrower type, let it come in that type.

    Its placeholder then stands for the narrow tensor, and its `stored_dtype` is the type that the optimizer has. Nodes
    of several graphs that stand for one parameter are narrowed all or none.
    """
    by_name: dict[str, list[Node]] = {}
    for node in held:
        by_name.setdefault(info_of(node).name, []).append(node)
    for nodes in by_name.values():
        casts = [user for node in nodes for user in node.users]
        dtypes = {u.meta["val"].dtype for u in casts if u.target is aten._to_copy.default}
        if not casts or any(u.target is not aten._to_copy.default for u in casts) or len(dtypes) != 1:
            continue
        (dtype,) = dtypes
        for node in nodes:
            _narrow(node, dtype)


def _narrow(node: Node, dtype: torch.dtype) -> None:
    value = node.meta["val"]
    if dtype.itemsize >= value.dtype.itemsize:
        return
    set_info(node, stored_dtype=value.dtype)
    node.meta["val"] = value.new_empty(value.shape, dtype=dtype)
    for cast in list(node.users):
        cast.replace_all_uses_with(node)
        cast.graph.erase_node(cast)


def repeat_views(graph: Graph, held: list[Node]) -> None:
    """Views of a parameter that both phases read: backward makes its own, so that forward's memory can go."""
    found: set[Node] = set()
    stack = list(held)
    while stack:
        views = [u for u in stack.pop().users if u.op == "call_function" and is_view(u)]
        found.update(views)
        stack += views
    early = [node for node in graph.nodes if node in found and phase_of(node) == "forward"]
    view_anew(graph, early, lambda user: phase_of(user) == "backward")
    graph.eliminate_dead_code()
