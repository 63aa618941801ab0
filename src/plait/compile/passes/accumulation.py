"""The graphs of a step's microbatches: the first begins the sums of gradients, the others add to them.

    turn     gradients that it returns                           runs
    alone    summed over ranks (zero 2 and 3: parts of them)     the only one; with zero 2 and 3 the first
    more     the same, added to those given                      with zero 2 and 3 all others
    first    this rank's own, not yet summed                     the first of several
    middle   the same, added to those given                      all between
    last     added to those given, then summed over ranks        the last

With zero=0 and 1 gradients are so summed over ranks once a step. With zero=2 and 3 a rank never holds more than its
part of the sums, so each microbatch's gradients are summed over ranks as they come, and the parts are added up.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import torch
from torch.fx import Graph, Node

from plait.compile.ir.calls import copy_graph, output_node, placeholders
from plait.compile.ir.dtypes import dtype_name
from plait.compile.ir.node_info import NodeInfo, describe, info_of
from plait.compile.ir.views import is_fresh
from plait.compile.passes.gather import narrow_parameters
from plait.compile.passes.scatter import gives_part, is_sum
from plait.compile.rank_program import StepGraph

aten = torch.ops.aten
SUM = "sum_of_"  # name of a placeholder that brings the sum so far of a gradient


def narrowed(graphs: Iterable[Graph], names: Collection[str]) -> dict[str, str]:
    """The dtypes in which graphs read those parameters, by name, where they are not the parameters' own. Changes the
    graphs: from here on they do."""
    parameters = [node for graph in graphs for node in placeholders(graph) if info_of(node).kind == "parameter"]
    parameters = [n for n in parameters if info_of(n).name in names]
    narrow_parameters(parameters)
    return {info_of(n).name: dtype_name(n.meta["val"].dtype) for n in parameters if info_of(n).stored_dtype is not None}


def by_turn(part: StepGraph, keeps_parts: bool) -> dict[str, Graph]:
    """The graphs by turn. With `keeps_parts` a rank sums gradients over ranks at every microbatch, of which it keeps
    its part."""
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
    """What goes into the sums over ranks that only make this output, before this rank takes its part."""
    node = result
    while (is_sum(node) or gives_part(node)) and len(node.users) == 1:
        node = node.args[0]  # type: ignore[assignment]
    return node


def _unsummed(graph: Graph, gradients: Mapping[int, str], add: bool) -> Graph:
    """Let the gradients leave as this rank's own terms, added to those given or in memory of their own."""
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
            results[index] = term if fresh and not shared else _own(graph, term)
    end.args = (tuple(results),)
    graph.eliminate_dead_code()
    return graph


def _add_to(graph: Graph, gradients: Mapping[int, str]) -> Graph:
    """Add the sums so far to each gradient's term, before it is summed over ranks. Whatever else reads the term, such
    as another cell that it is handed to, still gets this microbatch's own."""
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
        if not term.users and term.op == "call_function":  # a product that adds to the sum so far as it is made
            graph.erase_node(term)
    return graph


def _add_parts(graph: Graph, gradients: Mapping[int, str]) -> Graph:
    """Add each gradient, as it leaves the graph, to the sum so far."""
    end = output_node(graph)
    results = list(end.args[0])  # type: ignore[arg-type]
    for index, name in gradients.items():
        if isinstance(results[index], Node):
            results[index] = _added(graph, results[index], name)
    end.args = (tuple(results),)
    return graph


def _added(graph: Graph, term: Node, name: str) -> Node:
    """The term added to the sum so far, right after it is there."""
    value = term.meta["val"]
    contiguous = value if value.is_contiguous() else value.new_empty(value.shape)
    head = next(n for n in graph.nodes if n.op != "placeholder")
    with graph.inserting_before(head):
        given = graph.placeholder(SUM + "".join(c if c.isalnum() else "_" for c in name))
    describe(given, NodeInfo(kind="sum", name=name, owner=info_of(term).owner), contiguous)
    after = given if term.op == "placeholder" else term
    with graph.inserting_after(after):
        if term.target is aten.mm.default and len(term.users) == 1:  # a product adds to the sum as it is made
            total = graph.call_function(aten.addmm.default, (given, *term.args))
        else:
            total = graph.call_function(aten.add.Tensor, (given, term))
    total.meta = {**term.meta, "val": given.meta["val"]}
    return total


def _own(graph: Graph, term: Node) -> Node:
    with graph.inserting_before(output_node(graph)):
        copy = graph.call_function(aten.clone.default, (term,), {"memory_format": torch.contiguous_format})
    copy.meta = dict(term.meta)
    return copy
