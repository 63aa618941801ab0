"""Stage graphs: the graphs of the cells of a pipeline, and the values that one cell makes and others read.

A cell is the forward (F) or the backward (B) of a stage. If the schedule asks for it, the weight part (W) of a backward
is a cell of its own: it holds the calls that no other stage waits for (Qi et al. 2024, "Zero Bubble Pipeline
Parallelism"). A value is an output of the graph that makes it and an input of each graph that reads it. It is sent from
its stage directly to every stage that reads it, also if these are not neighbours.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.node import Argument

from plait.compile.capture.captured import Output
from plait.compile.ir.calls import (
    call_of,
    is_item,
    is_tensor,
    num_bytes,
    op_spec_of,
    output_node,
    own_memory,
    placeholders,
    tensor_inputs,
)
from plait.compile.ir.node_info import describe, info_of, is_backward, set_info, stage_of
from plait.compile.ops import CollectiveKind
from plait.compile.stages.assign import base_of
from plait.schedule.readiness import Cell, Edges

aten = torch.ops.aten


@dataclass(frozen=True)
class Value:
    """A local tensor that one cell makes and other cells read."""

    name: str
    source: Cell
    users: tuple[Cell, ...]  # in the order in which they run, without the source
    like: Tensor = field(compare=False)  # a fake tensor of its shape and dtype
    only: Mapping[str, int] = field(default_factory=dict)  # coordinates of the ranks that have it; empty: all ranks

    @property
    def num_bytes(self) -> int:
        return num_bytes(self.like)

    def stages(self) -> tuple[int, ...]:
        """The stages that the value is sent to."""
        return tuple(dict.fromkeys(stage for _, stage in self.users if stage != self.source[1]))


@dataclass(frozen=True)
class StageGraph:
    """The graph of a cell. Its `outputs` are first outputs of the step, then the values that other cells read."""

    graph: Graph
    outputs: tuple[Output, ...]


@dataclass(frozen=True)
class StageGraphs:
    """A step that is split into cells."""

    graphs: dict[Cell, StageGraph]
    values: tuple[Value, ...]
    num_stages: int
    parameters: dict[str, tuple[int, ...]]  # the stages that read each parameter, or give it gradients

    @property
    def added_up(self) -> frozenset[str]:
        """The parameters whose gradient is a sum over several cells."""
        made = Counter(o.name for each in self.graphs.values() for o in each.outputs if o.kind == "gradient")
        return frozenset(name for name, count in made.items() if count > 1)

    def edges(self) -> Edges:
        return edges_of(self.values)


def edges_of(values: Iterable[Value]) -> Edges:
    """The pairs of cells of which the second waits for the first: for each value, its first reader on every stage."""
    found = set()
    for value in values:
        for stage in {stage for _, stage in value.users}:
            found.add((value.source, next(cell for cell in value.users if cell[1] == stage)))
    return frozenset(found)


def split_cells(
    graph: Graph, outputs: Sequence[Output], num_stages: int, anywhere: Collection[Node], weights: bool
) -> StageGraphs:
    """Split a local graph, whose calls have a stage, into the graphs of its cells. Changes `graph`.

    Args:
        outputs: the outputs of the step, one for each result of the graph.
        anywhere: calls that each stage repeats for itself, so that their results are not sent.
        weights: whether the weight part of each backward is a cell of its own.
    """
    anywhere = set(anywhere)
    ends = _split_gradients(graph, outputs)
    order = {node: i for i, node in enumerate(graph.nodes)}
    cell_of = _assign(graph, ends, num_stages, anywhere, weights)
    cells = _in_order(num_stages, weights)
    ending: dict[Cell, list[tuple[Output, Any]]] = {cell: [] for cell in cells}
    for output, result in ends:
        assert not isinstance(result, Node) or result.op == "placeholder" or result in cell_of or result in anywhere
        ending[_cell_of_output(output, result, cell_of, anywhere, num_stages)].append((output, result))
    values = _values_sent(graph, cell_of, cells, anywhere)
    by_name = {value.name: value for value in values}
    nodes = {node.name: node for node in cell_of}
    for results in ending.values():
        for place, (output, result) in enumerate(results):
            if output.kind == "gradient" and result in cell_of and base_of(result).name in by_name:
                results[place] = (output, own_memory(graph, result))  # others are added to it in place
                cell_of[results[place][1]] = cell_of[result]
                order[results[place][1]] = len(order)
    inside: dict[Cell, dict[Node, None]] = {cell: {} for cell in cells}
    for node in sorted(cell_of, key=order.__getitem__):
        inside[cell_of[node]][node] = None
    graphs = {}
    for cell in cells:
        builder = _CellBuilder(cell, graph, inside[cell], anywhere)
        for node in inside[cell]:
            builder.copy(node)
        handed = [(Output("value", value.name), nodes[value.name]) for value in values if value.source == cell]
        graphs[cell] = builder.finish([*ending[cell], *handed])
    return StageGraphs(graphs, values, num_stages, _stages_of_parameters(graphs))


def _values_sent(
    graph: Graph, cell_of: Mapping[Node, Cell], cells: Sequence[Cell], anywhere: Collection[Node]
) -> tuple[Value, ...]:
    """The values that other cells read than the one that computes them, in the order of the graph."""
    readers: dict[Node, set[Cell]] = {}
    for node, cell in cell_of.items():
        for source in _sources(node, anywhere):
            if source.op == "call_function" and cell_of[source] != cell:
                readers.setdefault(source, set()).add(cell)
    place = {cell: i for i, cell in enumerate(cells)}
    values = []
    for node in graph.nodes:
        if node in readers:
            users = tuple(sorted(readers[node], key=place.__getitem__))
            assert all(place[user] > place[cell_of[node]] for user in users), f"{node} goes back in time"
            values.append(Value(node.name, cell_of[node], users, node.meta["val"], dict(info_of(node).owner)))
    return tuple(values)


def _stages_of_parameters(graphs: Mapping[Cell, StageGraph]) -> dict[str, tuple[int, ...]]:
    """For each parameter the stages that read it or have a gradient of it."""
    stages: dict[str, set[int]] = {}
    for (_, stage), each in graphs.items():
        inputs = (info_of(node) for node in placeholders(each.graph))
        read = [info.name for info in inputs if info.kind == "parameter"]
        for name in [*read, *(output.name for output in each.outputs if output.kind == "gradient")]:
            stages.setdefault(name, set()).add(stage)
    return {name: tuple(sorted(each)) for name, each in stages.items()}


def _split_gradients(graph: Graph, outputs: Sequence[Output]) -> list[tuple[Output, Any]]:
    """The outputs of the step with their nodes. A gradient that several stages add to becomes one term per stage.

    Changes `graph`.
    """
    (results,) = output_node(graph).args
    found: list[tuple[Output, Argument]] = []
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
    """The terms of a gradient that is a sum over several stages; the gradient itself if it is not."""
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
                copy = graph.node_copy(step)
            copy.replace_input_with(source, term)
            set_info(copy, stage=info_of(term).stage)
            term = copy
        found.append(term)
    return found


def _is_linear(node: Node) -> bool:
    """Whether the node is a view or a copy of one tensor, or a sum of it over ranks.

    Such a node can be applied to each term of a sum. Any other linear op would be computed once per stage.
    """
    row, sources = op_spec_of(node), tensor_inputs(node)
    if len(sources) != 1 or not is_tensor(node) or node.meta["val"].numel() < sources[0].meta["val"].numel():
        return False
    does = row.communicates
    if does is not None:  # any other collective would send more bytes if it came first
        sums = does.kind is CollectiveKind.ALL_REDUCE and does.part == "whole"
        return sums and (0,) in row.linear(call_of(node))
    return row.view is not None or row.copies == 0


def _in_order(num_stages: int, weights: bool) -> list[Cell]:
    """All cells, in an order in which a single rank can run them."""
    found: list[Cell] = [("F", stage) for stage in range(num_stages)]
    for stage in reversed(range(num_stages)):
        found += [("B", stage), ("W", stage)] if weights else [("B", stage)]
    return found


def _sources(node: Node, anywhere: Collection[Node]) -> Iterable[Node]:
    """The values that a stage needs in order to compute the node, besides the calls that it repeats."""
    for source in node.all_input_nodes:
        base = base_of(source, anywhere)
        if base not in anywhere:
            yield base


def _assign(
    graph: Graph, ends: Sequence[tuple[Output, object]], num_stages: int, anywhere: set[Node], weights: bool
) -> dict[Node, Cell]:
    """The cell of every call that an output of the step depends on."""
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
    """The backward calls that the backward of another stage waits for, and what they need of their own stage."""
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
    output: Output, result: object, cell_of: Mapping[Node, Cell], anywhere: Collection[Node], num_stages: int
) -> Cell:
    if isinstance(result, Node) and result in cell_of:
        return cell_of[result]
    last = num_stages - 1  # an output that no stage computes, such as the number of tokens in the batch
    return ("B", last) if output.kind == "gradient" else ("F", last)


class _CellBuilder:
    """Builds the graph of one cell, node by node. `inside` are the calls of the cell."""

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
        """The node of this graph for a node of the whole one: a call of the cell, a repeated call, or an input from
        another cell."""
        if node not in self._copies:
            if node in self._inside:
                made = self._graph.node_copy(node, self.copy)
                made.meta = dict(node.meta)
            else:
                repeated = node in self._anywhere or base_of(node, self._anywhere) is not node
                made = self._repeated(node) if repeated else self._input(node)
                info = info_of(node)._replace(phase="forward" if self._cell[0] == "F" else "backward")
                describe(made, info if repeated else info._replace(kind="value", name=node.name), node.meta.get("val"))
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
        for source in node.all_input_nodes:  # a copy must not begin while another node is copied
            self.copy(source)
        return self._graph.node_copy(node, self.copy)

    def _input(self, node: Node) -> Node:
        with self._graph.inserting_after(self._last_input):
            self._last_input = self._graph.placeholder(node.name)
        return self._last_input
