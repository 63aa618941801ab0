"""Stage graphs: the graphs that a pipeline's step consists of, and the values that go from one to another.

A cell is the forward (F) or the backward (B) of a stage; where the schedule wants it, the weight part (W) of a backward
is a cell of its own, which holds all that no other stage waits for (Qi et al. 2024, "Zero Bubble Pipeline
Parallelism"). A value goes straight from the cell that makes it to every stage that reads it, however far. It is an
output of the one graph, and an input of the others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from plait.compile.capture.capture import Output
from plait.compile.ir.calls import is_item, num_bytes, output_node, placeholders
from plait.compile.ir.node_info import describe, info_of, is_backward, stage_of
from plait.compile.stages.assign import base_of
from plait.compile.stages.shared import apart
from plait.schedule.readiness import Cell, Edges

aten = torch.ops.aten


@dataclass(frozen=True)
class Value:
    """What one cell makes and others read: a local tensor of this shape."""

    name: str
    source: Cell
    users: tuple[Cell, ...]  # in the order in which they run; the source is not among them
    like: Tensor = field(compare=False)  # fake
    only: Mapping[str, int] = field(default_factory=dict)  # coordinates of the ranks that have it, if not all have

    @property
    def num_bytes(self) -> int:
        return num_bytes(self.like)

    def stages(self) -> tuple[int, ...]:
        """The other stages that it is sent to."""
        return tuple(dict.fromkeys(stage for _, stage in self.users if stage != self.source[1]))


@dataclass(frozen=True)
class StageGraph:
    """The graph of a cell. `outputs` are those of the step that it makes, then the values that it hands on."""

    graph: Graph
    outputs: tuple[Output, ...]


@dataclass(frozen=True)
class StageGraphs:
    """A step in cells."""

    graphs: dict[Cell, StageGraph]
    values: tuple[Value, ...]
    num_stages: int
    parameters: dict[str, tuple[int, ...]]  # the stages that read each parameter, or give it gradients

    @property
    def added_up(self) -> frozenset[str]:
        """Parameters of whose gradients several cells make a term."""
        made = Counter(o.name for each in self.graphs.values() for o in each.outputs if o.kind == "gradient")
        return frozenset(name for name, count in made.items() if count > 1)

    def edges(self) -> Edges:
        return edges_of(self.values)


def edges_of(values: Iterable[Value]) -> Edges:
    """Which cell waits for which: for each value the first reader on every stage."""
    found = set()
    for value in values:
        for stage in {stage for _, stage in value.users}:
            found.add((value.source, next(cell for cell in value.users if cell[1] == stage)))
    return frozenset(found)


def split_cells(
    graph: Graph, outputs: Sequence[Output], num_stages: int, anywhere: Collection[Node], weights: bool
) -> StageGraphs:
    """The graphs of all cells, from a local graph whose calls know their stage. `weights` asks for cells W."""
    anywhere = set(anywhere)
    ends = apart(graph, outputs)
    order = {node: i for i, node in enumerate(graph.nodes)}
    cell_of = _assign(graph, ends, num_stages, anywhere, weights)
    turn = {cell: i for i, cell in enumerate(_in_order(num_stages, weights))}
    readers: dict[Node, set[Cell]] = {}
    for node, cell in cell_of.items():
        for source in _sources(node, anywhere):
            if source.op == "call_function" and cell_of[source] != cell:
                readers.setdefault(source, set()).add(cell)
    ending: dict[Cell, list[tuple[Output, Any]]] = {cell: [] for cell in turn}
    for output, result in ends:
        ending[_cell_of_output(output, result, cell_of, anywhere, num_stages)].append((output, result))
    for results in ending.values():
        for _, result in results:
            assert not isinstance(result, Node) or result.op == "placeholder" or result in cell_of or result in anywhere
    values = []
    for node in sorted(readers, key=order.__getitem__):
        users = tuple(sorted(readers[node], key=turn.__getitem__))
        assert all(turn[user] > turn[cell_of[node]] for user in users), f"{node} goes back in time"
        values.append(Value(node.name, cell_of[node], users, node.meta["val"], dict(info_of(node).owner)))
    by_name = {value.name: value for value in values}
    nodes = {node.name: node for node in cell_of}
    for results in ending.values():
        for place, (output, result) in enumerate(results):
            if output.kind == "gradient" and result in cell_of and base_of(result).name in by_name:
                results[place] = (output, _own(graph, result))
                cell_of[results[place][1]] = cell_of[result]
                order[results[place][1]] = len(order)
    inside: dict[Cell, dict[Node, None]] = {cell: {} for cell in turn}
    for node in sorted(cell_of, key=order.__getitem__):
        inside[cell_of[node]][node] = None
    graphs = {}
    for cell in turn:
        builder = _CellBuilder(cell, graph, inside[cell], anywhere)
        for node in inside[cell]:
            builder.copy(node)
        handed = [(Output("value", value.name), nodes[value.name]) for value in values if value.source == cell]
        graphs[cell] = builder.finish([*ending[cell], *handed])
    parameters: dict[str, set[int]] = {}
    for cell, each in graphs.items():
        for node in placeholders(each.graph):
            if info_of(node).kind == "parameter":
                parameters.setdefault(info_of(node).name, set()).add(cell[1])
        for output in each.outputs:
            if output.kind == "gradient":
                parameters.setdefault(output.name, set()).add(cell[1])
    return StageGraphs(graphs, tuple(values), num_stages, {n: tuple(sorted(s)) for n, s in parameters.items()})


def _own(graph: Graph, gradient: Node) -> Node:
    """A copy of a gradient, to which others are added in place, where another cell reads the same memory."""
    with graph.inserting_before(output_node(graph)):
        copy = graph.call_function(aten.clone.default, (gradient,), {"memory_format": torch.contiguous_format})
    copy.meta = {**gradient.meta, "val": gradient.meta["val"].contiguous()}
    return copy


def _in_order(num_stages: int, weights: bool) -> list[Cell]:
    """All cells in an order in which one rank alone could run them."""
    found: list[Cell] = [("F", stage) for stage in range(num_stages)]
    for stage in reversed(range(num_stages)):
        found += [("B", stage), ("W", stage)] if weights else [("B", stage)]
    return found


def _sources(node: Node, anywhere: Collection[Node]) -> Iterable[Node]:
    """The values that must be at hand to make the node, once what is repeated is."""
    for source in node.all_input_nodes:
        base = base_of(source, anywhere)
        if base not in anywhere:
            yield base


def _assign(
    graph: Graph, ends: Sequence[tuple[Output, Any]], num_stages: int, anywhere: set[Node], weights: bool
) -> dict[Node, Cell]:
    """The cell of every call that something needs."""
    needed: set[Node] = set()
    stack = [result for _, result in ends if isinstance(result, Node)]
    while stack:
        node = stack.pop()
        if node.op == "call_function" and node not in needed and node not in anywhere:
            needed.add(node)
            stack += [node.all_input_nodes[0]] if is_item(node) else _sources(node, anywhere)
    found: dict[Node, Cell] = {}
    for node in graph.nodes:
        if node in needed:
            found[node] = ("B" if is_backward(node) else "F", stage_of(node))
    if weights:
        waited_for = _waited_for(found, anywhere)
        for node, (kind, stage) in found.items():
            if kind == "B" and node not in waited_for:
                found[node] = ("W", stage)
    return found


def _waited_for(cell_of: Mapping[Node, Cell], anywhere: Collection[Node]) -> set[Node]:
    """Backward calls that another stage's backward waits for, and all that they need of their own stage."""
    stack = [
        source
        for node, cell in cell_of.items()
        for source in _sources(node, anywhere)
        if source in cell_of and cell_of[source][0] == "B" and cell_of[source][1] != cell[1]
    ]
    found: set[Node] = set()
    while stack:
        node = stack.pop()
        if node in found:
            continue
        found.add(node)
        stack += [s for s in _sources(node, anywhere) if s in cell_of and cell_of[s] == cell_of[node]]
    return found


def _cell_of_output(
    output: Output, result: Any, cell_of: Mapping[Node, Cell], anywhere: Collection[Node], num_stages: int
) -> Cell:
    if isinstance(result, Node) and result in cell_of:
        return cell_of[result]
    last = num_stages - 1  # what needs no stage, such as a weight that counts the batch's tokens
    return ("B", last) if output.kind == "gradient" else ("F", last)


class _CellBuilder:
    """Writes the graph of a cell, node after node: `inside` are its own calls."""

    def __init__(self, cell: Cell, whole: Graph, inside: Collection[Node], anywhere: Collection[Node]) -> None:
        self._cell = cell
        self._inside = inside
        self._anywhere = anywhere
        self._graph = Graph()
        self._copies: dict[Node, Node] = {}
        for node in placeholders(whole):
            self._copies[node] = self._graph.placeholder(node.name)
            self._copies[node].meta = dict(node.meta)
        self._last_input = self._copies[placeholders(whole)[-1]]

    def copy(self, node: Node) -> Node:
        """The node in this graph: one of its own, repeated here, or handed on by another cell."""
        if node not in self._copies:
            if node in self._inside:
                made = self._graph.node_copy(node, self.copy)
                made.meta = dict(node.meta)
            else:
                repeated = node in self._anywhere or base_of(node, self._anywhere) is not node
                made = self._repeated(node) if repeated else self._input(node)
                info = replace(info_of(node), phase="forward" if self._cell[0] == "F" else "backward")
                describe(made, info if repeated else replace(info, kind="value", name=node.name), node.meta.get("val"))
            self._copies[node] = made
        return self._copies[node]

    def finish(self, results: Sequence[tuple[Output, Any]]) -> StageGraph:
        found = [(output, self.copy(result) if isinstance(result, Node) else result) for output, result in results]
        self._graph.output(tuple(result for _, result in found))
        for node in placeholders(self._graph):
            if not node.users:
                self._graph.erase_node(node)
        self._graph.lint()
        return StageGraph(self._graph, tuple(output for output, _ in found))

    def _repeated(self, node: Node) -> Node:
        for source in node.all_input_nodes:  # before the copy, not within it
            self.copy(source)
        return self._graph.node_copy(node, self.copy)

    def _input(self, node: Node) -> Node:
        with self._graph.inserting_after(self._last_input):
            self._last_input = self._graph.placeholder(node.name)
        return self._last_input
