"""What stages share: buffers that change from microbatch to microbatch, and the gradients of tied weights."""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Graph, Node

from plait.compile.capture.capture import Output
from plait.compile.ir.calls import call_of, is_tensor, op_spec_of, output_node, placeholders, tensor_inputs
from plait.compile.ir.node_info import describe, info_of, is_backward, set_info
from plait.compile.ir.views import may_alias, view_anew
from plait.compile.ops import CollectiveKind

aten = torch.ops.aten


def keep_written_buffers(graph: Graph, written: Collection[str]) -> None:
    """Let all but the first reader's stage and phase have the values that buffers had when the forward pass read them.

    Later microbatches change them before the backward of this one, and so does this one's forward. What backward reads
    through a view, it reads through a view of its own: one that forward hands on lies in the buffer. Changes `graph`.
    """
    for node in placeholders(graph):
        if info_of(node).kind != "buffer" or info_of(node).name not in written or not is_tensor(node):
            continue
        view_anew(graph, _views_of(graph, node), is_backward)
        users = [u for u in node.users if u.op == "call_function"]
        if not any(is_backward(u) for u in users):
            continue
        first = next(u for u in graph.nodes if u in node.users)
        with graph.inserting_before(first):
            copy = graph.call_function(aten.clone.default, (node,))
        describe(copy, replace(info_of(first), phase="forward", owner={}), node.meta["val"])
        for user in users:
            if is_backward(user):
                user.replace_input_with(node, copy)


def _views_of(graph: Graph, source: Node) -> list[Node]:
    """The views of a value that forward makes, in the graph's order, views of views and parts of them among them."""
    found = {source: None}
    for node in graph.nodes:
        if node.op != "call_function" or is_backward(node) or not may_alias(node):
            continue
        if not found.keys().isdisjoint(node.all_input_nodes):
            found[node] = None
    return [*found][1:]


def apart(graph: Graph, outputs: Sequence[Output]) -> list[tuple[Output, Any]]:
    """The step's outputs with their nodes, where a gradient that several stages add to is one term for each of them.

    Changes `graph`.
    """
    (results,) = output_node(graph).args
    found: list[tuple[Output, Any]] = []
    for output, result in zip(outputs, results, strict=True):  # type: ignore[arg-type]
        if output.kind != "gradient" or not isinstance(result, Node):
            found.append((output, result))
            continue
        terms = _terms(graph, result)
        by_stage: dict[int, list[Node]] = {}
        for term in terms:
            by_stage.setdefault(info_of(term).stage or 0, []).append(term)
        for members in by_stage.values():
            total = members[0]
            for other in members[1:]:
                with graph.inserting_before(output_node(graph)):
                    both = graph.call_function(aten.add.Tensor, (total, other))
                both.meta = dict(total.meta)
                total = both
            found.append((output, total))
    return found


def _terms(graph: Graph, result: Node) -> list[Node]:
    """What is added up to give a gradient, as far as it comes from different stages."""
    chain: list[Node] = []
    node = result
    while node.op == "call_function" and _is_linear(node):
        chain.append(node)
        (node,) = tensor_inputs(node)
    if node.target is not aten.add.Tensor or len(node.args) != 2 or node.kwargs:
        return [result]
    sides = [a for a in node.args if isinstance(a, Node)]
    terms = [t for side in sides for t in _terms(graph, side)]
    stages = {info_of(t).stage for t in terms}
    if len(sides) < 2 or len(stages) == 1 or (chain and None in stages):
        return [result]
    found = []
    for term in terms:
        for step in reversed(chain):
            (source,) = tensor_inputs(step)
            with graph.inserting_before(output_node(graph)):
                copy = graph.node_copy(step, functools.partial(_instead, source, term))
            set_info(copy, stage=info_of(term).stage)
            term = copy
        found.append(term)
    return found


def _instead(source: Node, term: Node, node: Node) -> Node:
    return term if node is source else node


def _is_linear(node: Node) -> bool:
    """Whether the node only brings its one tensor into another form, or sums it over ranks, so that a sum may be taken
    apart before it. What computes stays whole: it would be done once for each stage."""
    row, sources = op_spec_of(node), tensor_inputs(node)
    if len(sources) != 1 or not is_tensor(node) or node.meta["val"].numel() < sources[0].meta["val"].numel():
        return False
    does = row.communicates
    if does is not None:  # of others more would be sent
        sums = does.kind is CollectiveKind.ALL_REDUCE and does.part == "whole"
        return sums and (0,) in row.linear(call_of(node))
    return row.view is not None or row.copies == 0
