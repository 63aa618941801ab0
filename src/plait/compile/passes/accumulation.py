"""Gradient accumulation: the graphs of a step's microbatches, which add up gradients from one to the next.

    name     microbatch                                 gradients that its graph returns
    alone    the only one; the first with zero=2 and 3  summed over ranks (with zero=2 and 3, a part of the sum)
    more     all others with zero=2 and 3               as alone, added to the sums that it is given
    first    the first of several                       of this rank, not summed over ranks
    middle   those between                              as first, added to the sums that it is given
    last     the last of several                        added to the sums that it is given, then summed over ranks

With zero=0 and 1, gradients are summed over ranks once a step. With zero=2 and 3 a rank holds only its part of the
sums, so gradients are summed over ranks in every microbatch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import torch
from torch.fx import Graph, Node

from plait.compile.ir.calls import (
    copy_graph,
    drop_dead_calls,
    is_cast,
    is_fresh,
    is_whole_view,
    output_node,
    own_memory,
    placeholders,
)
from plait.compile.ir.dtypes import dtype_name
from plait.compile.ir.node_info import NodeInfo, describe, info_of
from plait.compile.passes.zero import gives_part, is_sum, narrow_parameters
from plait.compile.rank_program import StepGraph

aten = torch.ops.aten
SUM = "sum_of_"  # prefix of the placeholders of gradients of earlier microbatches


def narrow_dtypes(graphs: Iterable[Graph], names: Collection[str]) -> dict[str, str]:
    """Let graphs read the named parameters in the narrower dtype to which every reader casts them.

    Changes the graphs. Returns the new dtypes by name of parameter.
    """
    parameters = [node for graph in graphs for node in placeholders(graph) if info_of(node).kind == "parameter"]
    parameters = [n for n in parameters if info_of(n).name in names]
    narrow_parameters(parameters)
    return {info_of(n).name: dtype_name(n.meta["val"].dtype) for n in parameters if info_of(n).stored_dtype is not None}


def accumulation_graphs(part: StepGraph, keeps_parts: bool) -> dict[str, Graph]:
    """The graphs of a step or a cell for its microbatches, by name.

    With `keeps_parts` (zero=2 and 3) gradients are summed over ranks in every microbatch, and a rank keeps its part.
    """
    graph, gradients = part.graph, part.gradients
    most = max(part.num_micro, default=1)
    found: dict[str, Graph] = {}
    if most == 1 or 1 in part.num_micro or not gradients or keeps_parts:
        found["alone"] = graph if most == 1 or not gradients else copy_graph(graph)
    if most > 1 and gradients and keeps_parts:
        found["more"] = _add_parts(graph, gradients)
    elif most > 1 and gradients:
        found["first"] = _unsummed(copy_graph(graph), gradients, add=False)
        if most > 2:
            found["middle"] = _unsummed(copy_graph(graph), gradients, add=True)
        found["last"] = _add_to(graph, gradients)
    return found


def _term(result: Node) -> Node:
    """The gradient of this rank, before the sums over ranks and the cuts that lead to this output."""
    node = result
    while (is_sum(node) or gives_part(node)) and len(node.users) == 1:
        node = node.args[0]  # type: ignore[assignment]
    return node


def _unsummed(graph: Graph, gradients: Mapping[int, str], add: bool) -> Graph:
    """Let the graph return this rank's gradients, before sums over ranks.

    With `add` they are added to those of earlier microbatches; else they are in memory of their own.
    """
    end = output_node(graph)
    results = list(end.args[0])  # type: ignore[arg-type]
    terms = {i: _term(results[i]) for i in gradients if isinstance(results[i], Node)}
    others = [result for i, result in enumerate(results) if i not in gradients]
    for index, term in terms.items():
        if add:
            results[index] = _added(graph, term, gradients[index])
        else:
            shared = sum(r is term for r in (*terms.values(), *others)) > 1 or len(term.users) > 1
            fresh = is_fresh(term) and term.meta["val"].is_contiguous()
            results[index] = term if fresh and not shared else own_memory(graph, term)
    end.args = (tuple(results),)
    drop_dead_calls(graph)
    return graph


def _add_to(graph: Graph, gradients: Mapping[int, str]) -> Graph:
    """Add the gradients of earlier microbatches before gradients are summed over ranks.

    Any other reader of a gradient, such as another cell, still reads that of this microbatch.
    """
    end = output_node(graph)
    results = list(end.args[0])  # type: ignore[arg-type]
    terms: list[Node] = []
    for index, name in gradients.items():
        if not isinstance(node := results[index], Node):
            continue
        term, reader = _term(node), None
        while node is not term:
            source = node.args[0]
            assert isinstance(source, Node)
            node, reader = source, node
        total = _added(graph, term, name)
        if reader is None:
            results[index] = total
        else:
            reader.replace_input_with(term, total)
        terms.append(term)
    end.args = (tuple(results),)
    for term in terms:
        if not term.users and term.op == "call_function":  # addmm took its place
            graph.erase_node(term)
    return graph


def _add_parts(graph: Graph, gradients: Mapping[int, str]) -> Graph:
    """Add the gradients of earlier microbatches to what the graph returns."""
    end = output_node(graph)
    results = list(end.args[0])  # type: ignore[arg-type]
    for index, name in gradients.items():
        if isinstance(results[index], Node):
            results[index] = _added(graph, results[index], name)
    end.args = (tuple(results),)
    return graph


def _added(graph: Graph, term: Node, name: str) -> Node:
    """Add a gradient to that of earlier microbatches, right after it is computed."""
    value = term.meta["val"]
    contiguous = value if value.is_contiguous() else value.new_empty(value.shape)
    head = next(n for n in graph.nodes if n.op != "placeholder")
    with graph.inserting_before(head):
        given = graph.placeholder(SUM + "".join(c if c.isalnum() else "_" for c in name))
    describe(given, NodeInfo(kind="sum", name=name, owner=info_of(term).owner), contiguous)
    after = given if term.op == "placeholder" else term
    with graph.inserting_after(after):
        if term.target is aten.mm.default and len(term.users) == 1:  # one kernel multiplies and adds
            total = graph.call_function(aten.addmm.default, (given, *term.args))
        else:
            total = graph.call_function(aten.add.Tensor, (given, _narrow_of(term)))
    total.meta = {**term.meta, "val": given.meta["val"]}
    return total


def _narrow_of(term: Node) -> Node:
    """The gradient in the dtype in which it is computed, if a cast to a wider one is all that there is in between: the
    addition widens it without memory of its own."""
    source = term.all_input_nodes[0] if is_cast(term) else term
    dtype = term.meta["val"].dtype
    return source if torch.promote_types(source.meta["val"].dtype, dtype) == dtype else term


def own_gradients(graph: Graph, gradients: Iterable[int]) -> Graph:
    """Give every gradient memory of its own, so that it can be updated in place. Changes `graph` and returns it.

    `gradients` are the indices of outputs. A gradient is copied if it is an input or an expanded tensor, or shares its
    memory with an earlier one: two parameters that are added have the same gradient.
    """
    end = output_node(graph)
    results = list(end.args[0])  # type: ignore[arg-type]
    seen: set[Node] = set()
    for index in gradients:
        node = base = results[index]
        while is_whole_view(base):
            base = base.args[0]
        if base in seen or base.op == "placeholder" or base.target is aten.expand.default:
            results[index] = own_memory(graph, node)
        seen.add(base)
    end.args = (tuple(results),)
    return graph
