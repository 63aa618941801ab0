"""ZeRO: gradients are reduce-scattered over an axis, and with ZeRO-3 (FSDP) parameters are gathered for each use.

A gathered parameter lives until its last reader in a phase; backward gathers it again (Rajbhandari et al. 2020, "ZeRO";
Zhao et al. 2023, "PyTorch FSDP"). A parameter that is read in half precision only is also sent in half precision.

Sums of gradients over ranks come last: casts and views of a sum become those of its terms. A kernel may accumulate the
gradient of a half-precision weight in float32, as that of RMS norm does. One device rounds it once at the end. Ranks
that sum first and round later would send twice the bytes, for each microbatch, and in no bucket, because what is
returned is no sum. A term is a gradient in the dtype of its weight, as those of products are, and as PyTorch's DDP
sends them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Graph, Node

from plait.compile.ir.calls import (
    drop_dead_calls,
    is_cast,
    is_view,
    is_whole_view,
    output_node,
    placeholders,
    view_anew,
)
from plait.compile.ir.node_info import describe, info_of, phase_of, set_info
from plait.compile.ops import comm_ops
from plait.compile.sharding.flat_shards import Cut
from plait.spec.mesh import JOIN

aten = torch.ops.aten


def gather_parameters(graph: Graph, cuts: Mapping[str, Cut], axes: Mapping[str, str]) -> Graph:
    """Replace parameters by parts that are gathered before their use. Changes `graph` and returns it.

    `cuts` says how each parameter is cut of which a rank holds only a part, and `axes` along which axis, by name.
    """
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
            made = info._replace(phase=phase_of(first), module=info_of(first).module, origin="zero=3")
            with graph.inserting_before(first):
                sent = node
                if dtype != whole.dtype:
                    sent = graph.call_function(aten._to_copy.default, (node,), {"dtype": whole.dtype})
                    describe(sent, made, part.new_empty(part.shape, dtype=whole.dtype))
                gathered = graph.call_function(comm_ops.gather_part, (sent, axes[info.name], cut.plain))
            describe(gathered, made, whole)
            for reader in readers:
                reader.replace_input_with(node, gathered)
    graph.lint()
    return graph


def readers_in(phase: str, nodes: Sequence[Node]) -> dict[Node, list[Node]]:
    """The calls of a phase, forward or backward, that read each node. Nodes without readers are left out."""
    found = {node: [u for u in node.users if u.op != "output" and phase_of(u) == phase] for node in nodes}
    return {node: users for node, users in found.items() if users}


def narrow_parameters(held: list[Node]) -> None:
    """Let the graph take a parameter in the narrower dtype to which every one of its readers casts it.

    Changes the placeholders `held`; `stored_dtype` becomes the dtype that the optimizer has. The placeholders of a
    parameter in several graphs change together or not at all.
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
    """Give backward its own copies of views of parameters, so that the gathered memory of forward can be freed."""
    found: set[Node] = set()
    stack = list(held)
    while stack:
        views = [u for u in stack.pop().users if u.op == "call_function" and is_view(u)]
        found.update(views)
        stack += views
    early = [node for node in graph.nodes if node in found and phase_of(node) == "forward"]
    view_anew(graph, early, lambda user: phase_of(user) == "backward")
    drop_dead_calls(graph)


def scatter_gradients(graph: Graph, cuts: Mapping[int, tuple[Cut, str]]) -> Graph:
    """Let the graph return this rank's part of the outputs in `cuts`, along the axis given there. Changes `graph` and
    returns it.

    An all-reduce over the axis becomes a reduce-scatter. It then comes before all-reduces over other axes, so that
    these sum parts. An output that is not summed over the axis is the same on every rank, which takes its part.
    """
    end = output_node(graph)
    results = list(end.args[0])  # type: ignore[arg-type]
    replaced: list[Node] = []
    for index, (cut, axis) in cuts.items():
        if isinstance(result := results[index], Node):
            sums = sums_before(result, end)
            summed_over = [str(one.args[1]) for one in sums]
            if axis in summed_over:
                others = [other for other in summed_over if other != axis]
                results[index] = _scattered(graph, sums, axis, others, cut)
                replaced += sums[::-1]
            else:
                with graph.inserting_before(end):
                    results[index] = graph.call_function(comm_ops.take_part, (result, axis, cut.plain))
                describe(results[index], info_of(result), result.meta["val"].new_empty(cut.part_shape(0)))
    end.args = (tuple(results),)
    for node in replaced:
        if not node.users:  # two outputs may be one sum
            graph.erase_node(node)
    return graph


def join_sums(graph: Graph, joined: Sequence[str]) -> Graph:
    """Sum outputs over joined axes at once, where the graph sums them over one axis after the other. The first of
    `joined` that fits is taken. Changes `graph` and returns it."""
    end = output_node(graph)
    for result in dict.fromkeys(end.all_input_nodes):
        sums = {str(one.args[1]): one for one in sums_before(result, end)}
        for name in joined:
            first, *others = axes = name.split(JOIN)
            if all(axis in sums for axis in axes):
                sums[first].args = (sums[first].args[0], name, "sum")
                for axis in others:
                    source = sums[axis].args[0]
                    assert isinstance(source, Node)
                    sums[axis].replace_all_uses_with(source)
                    graph.erase_node(sums[axis])
                break
    return graph


def sums_before(result: Any, reader: Node) -> list[Node]:
    """The all-reduces, in order, that lead to `result` and to nothing but its `reader`."""
    found: list[Node] = []
    while isinstance(result, Node) and is_sum(result) and set(result.users) == {reader}:
        found.append(result)
        result, reader = result.args[0], result
    return found[::-1]


def is_sum(node: Node) -> bool:
    """Whether the node is an all-reduce that sums."""
    return node.target is comm_ops.all_reduce and node.args[2] == "sum"


def gives_part(node: Node) -> bool:
    """Whether the result of the node is this rank's part of a sum or of a tensor."""
    return node.target in (comm_ops.scatter_part, comm_ops.take_part)


def _scattered(graph: Graph, sums: Sequence[Node], axis: str, others: Sequence[str], cut: Cut) -> Node:
    """The sums as a reduce-scatter over `axis`, and all-reduces of the parts over the others."""
    term, last = sums[0].args[0], sums[-1]
    assert isinstance(term, Node)
    with graph.inserting_before(last):
        made = [graph.call_function(comm_ops.scatter_part, (term, axis, cut.plain))]
        for other in others:
            made.append(graph.call_function(comm_ops.all_reduce, (made[-1], other, "sum")))
    value = last.meta["val"].new_empty(cut.part_shape(0))
    for node in made:
        describe(node, info_of(last), value)
    return made[-1]


def sum_last(graph: Graph, gradients: Collection[int]) -> Graph:
    """Let outputs of a local graph be sums where they are casts or views of sums. Changes `graph` and returns it.

    `gradients` are the indices of the outputs.
    """
    end = output_node(graph)
    results = list(end.args[0])  # type: ignore[arg-type]
    for index in gradients:
        if isinstance(result := results[index], Node):
            results[index] = _summed_last(graph, result, end)
    end.args = (tuple(results),)
    drop_dead_calls(graph)
    return graph


def _summed_last(graph: Graph, result: Node, end: Node) -> Node:
    steps: list[Node] = []  # the last one first
    node, reader = result, end
    while (is_sum(node) or is_cast(node) or is_whole_view(node)) and {*node.users} == {reader}:
        steps.append(node)
        node, reader = node.all_input_nodes[0], node
    while steps and not is_sum(steps[-1]):
        steps.pop()
    changes = [step for step in reversed(steps) if not is_sum(step)]
    if not changes:
        return result
    sums = [step for step in reversed(steps) if is_sum(step)]
    term = sums[0].all_input_nodes[0]
    with graph.inserting_before(sums[0]):  # as early as before, so that they are sent while backward runs
        for step in (*changes, *sums):
            made = graph.node_copy(step)
            made.replace_input_with(step.all_input_nodes[0], term)
            if is_sum(step):
                made.meta["val"] = result.meta["val"]
            term = made
    return term
