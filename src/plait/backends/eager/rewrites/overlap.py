"""Starts collectives of activations early, waits for them late, and computes gradients of weights in between.

A collective starts right behind its input and is waited for right before its first reader. What the next layer of a
backward pass waits for is a chain: gradients of activations and their collectives. Gradients of weights are no part of
it, and run while its collectives are under way (as in Megatron-LM, Korthikanti et al. 2022, and in "Breadth-First
Pipeline Parallelism", Lamy-Poirier 2023). At most one product waits for each collective of the chain, so that what it
reads does not live long.

    product of activations | start | product of weights | wait | norm | start | product of weights | wait ...
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from torch.fx import Graph, Node

from plait.backends.eager.collectives import Halves, halves_of
from plait.compile.ir.calls import is_item, is_view, is_whole_view, output_node
from plait.compile.ir.estimate import flops_of
from plait.compile.ir.node_info import describe, info_of, is_backward, phase_of

_LATE = 2  # collectives of the chain after which what was put off is computed in any case


def overlap(graph: Graph) -> Graph:
    """Split collectives into a start and a wait, with work in between. Changes `graph` and returns it."""
    split = [_split(node, halves) for node in list(graph.nodes) if (halves := halves_of(node.target)) is not None]
    _put_off(graph, {each.start for each in split if not each.again}, {each.wait for each in split})
    for each in split:
        min(each.wait.users).prepend(each.wait)
        if each.again:
            _product_before(each.wait).prepend(each.start)
        if not _works_between(each.start, each.wait):
            each.wait.target, each.wait.args = each.whole, each.start.args
            graph.erase_node(each.start)
    graph.lint()
    return graph


@dataclass(frozen=True)
class _Split:
    """The calls that start the collective `whole` and wait for it. `again` says whether backward repeats what forward
    has sent: it may then start at any time."""

    start: Node
    wait: Node
    whole: Any
    again: bool


def _split(node: Node, halves: Halves) -> _Split:
    """Start a collective behind its input, and have `node` wait for it before its first reader."""
    graph, whole, source = node.graph, node.target, node.args[1]
    assert isinstance(source, Node)
    _hoist_views(source)
    again = source.op == "call_function" and phase_of(source) != phase_of(node)
    with graph.inserting_before(node) if again else graph.inserting_after(source):
        start = graph.call_function(halves.start, node.args)
    describe(start, info_of(node), None)
    node.target, node.args = halves.wait, (start, *(node.args[i] for i in halves.rest))
    min(node.users).prepend(node)
    return _Split(start, node, whole, again)


def _works_between(start: Node, wait: Node) -> bool:
    """Whether more than views and items of results stand between two calls."""
    node = start.next
    while node is not wait and (is_view(node) or is_item(node)):
        node = node.next
    return node is not wait


def _product_before(wait: Node) -> Node:
    """The last product of the same phase before a call, or the call itself."""
    node = wait.prev
    while node.op == "call_function" and phase_of(node) == phase_of(wait):
        if flops_of(node):
            return node
        node = node.prev
    return wait


def _put_off(graph: Graph, starts: Collection[Node], waits: Collection[Node]) -> None:
    """Move calls of backward that no collective of the chain needs to where such collectives are waited for."""
    needed = _needed(starts)
    later: deque[tuple[Node, int]] = deque()  # calls that are put off, with the number of waits before them
    num_waits, works = 0, False
    for node in list(graph.nodes):
        if node in needed and node in waits:
            num_waits += 1
            _compute(node, later, num_waits, works)
            works = False
        elif node in needed:
            works = node not in starts and (works or flops_of(node) > 0)
        elif node.op == "call_function" and is_backward(node):
            later.append((node, num_waits))
        elif node.op == "call_function" or node is output_node(graph):
            _compute(node, later, num_waits + _LATE + 1, False)


def _compute(before: Node, later: deque[tuple[Node, int]], num_waits: int, works: bool) -> None:
    """Compute what was put off before a call: one product, unless work is done already, and all that is late."""
    while later and (not works or num_waits - later[0][1] > _LATE):
        node, _ = later.popleft()
        before.prepend(node)
        works = works or flops_of(node) > 0


def _needed(starts: Collection[Node]) -> set[Node]:
    """The starts, and the calls of backward that lead to them."""
    found: set[Node] = set()
    stack = list(starts)
    while stack:
        node = stack.pop()
        if node not in found and node.op == "call_function" and is_backward(node):
            found.add(node)
            stack += node.all_input_nodes
    return found


def _hoist_views(node: Node) -> None:
    """Move a view, and the views that it is made of, up to the call that allocates the memory."""
    if is_whole_view(node):
        source = node.all_input_nodes[0]
        _hoist_views(source)
        source.append(node)
