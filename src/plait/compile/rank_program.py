"""Rank programs: what the ranks of a plan run in a step, as functional graphs of tensors.

A graph takes tensors and returns tensors. Nothing is written in place, and a collective is one call that takes a tensor
and returns one (compile/ops/comm_ops.py). A backend decides when a collective starts, which collectives share a bucket,
and where tensors are kept between two uses (backends/backend.py).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from plait.compile.capture.captured import Captured, Output
from plait.compile.ir.calls import is_tensor, output_node
from plait.compile.ir.dtypes import dtype_named
from plait.compile.ir.node_info import NodeInfo, describe, info_of
from plait.compile.ops.expert_parameters import own_part
from plait.compile.sharding.flat_shards import Cut
from plait.compile.stages.split import Pipeline
from plait.plan.plan import Plan
from plait.plan.sharding_plan import ShardingPlan
from plait.schedule.readiness import Cell
from plait.spec.cluster import Cluster
from plait.spec.layout import Layout


@dataclass
class StepGraph:
    """One of the graphs of a step: the whole step, a cell of its pipeline, or either of them for some microbatches."""

    graph: Graph
    outputs: tuple[Output, ...]
    num_micro: frozenset[int]  # numbers of microbatches that ranks run it on in a step
    cell: Cell | None = None  # the cell of the pipeline, if the step is split
    accumulation: str = ""  # the microbatches that it is for, once the step is repeated (passes/accumulation.py)

    @property
    def gradients(self) -> dict[int, str]:
        """The parameters whose gradients the graph returns, by index of the output."""
        return {i: output.name for i, output in enumerate(self.outputs) if output.kind == "gradient"}


@dataclass(frozen=True, eq=False)
class RankProgram:
    """The graphs of a step, and the layouts of the values that they take and return.

    All ranks have the same graphs, except for parallel branches (`graph_of_rank`).

    graphs    by accumulation (`accumulation_of`), or with a pipeline by cell and accumulation: F0.alone, B0.first...
    layouts   of the parameters, buffers, constants and batch leaves that the graphs read, by name
    sharding  how the ranks hold each parameter
    cuts      by name, how each parameter is cut that a rank keeps only a part of
    cluster   the machine for which times of calls and messages were estimated
    """

    graphs: dict[str, StepGraph]
    captured: Captured
    plan: Plan
    layouts: dict[str, Layout]
    sharding: ShardingPlan
    cuts: dict[str, Cut]
    cluster: Cluster
    pipeline: Pipeline | None = None

    def dtype_of(self, name: str) -> torch.dtype:
        """The dtype that a parameter has in the model."""
        return dtype_named(self.sharding.parameters[name].state.dtype)

    @property
    def micro_graphs(self) -> tuple[str, ...]:
        """The names of the graphs that run the microbatches of a step, in order."""
        return accumulation_of(self.plan.micro, self.graphs.keys())

    def micro_graphs_of_cell(self, cell: Cell, num_micro: int) -> tuple[str, ...]:
        """The names of the graphs that run `num_micro` microbatches of a cell on one rank, in order."""
        known = {each.accumulation for each in self.graphs.values() if each.cell == cell}
        return tuple(f"{cell_name(cell)}.{place}" for place in accumulation_of(num_micro, known))

    def of_cells(self, graphs: Mapping[str, Graph]) -> dict[Cell, Graph]:
        """The graph of each cell's last microbatch, among `graphs` by the names that they have in the program."""
        assert self.pipeline is not None
        cells = [(cell, max(self.pipeline.num_micro(cell), default=0)) for cell in self.pipeline.cells.graphs]
        return {cell: graphs[self.micro_graphs_of_cell(cell, num)[-1]] for cell, num in cells}


def accumulation_of(num_micro: int, graphs: Collection[str]) -> tuple[str, ...]:
    """The accumulation of each of `num_micro` microbatches, given those that have a graph: alone, first, middle, last
    or more (compile/passes/accumulation.py)."""
    if "first" not in graphs or num_micro == 1:
        return ("alone", *["more" if "more" in graphs else "alone"] * (num_micro - 1))
    return ("first", *["middle"] * (num_micro - 2), "last")


def cell_name(cell: Cell) -> str:
    """The name of a cell, such as F0 or B1."""
    return f"{cell[0]}{cell[1]}"


def runs_on(node: Node, coordinates: Mapping[str, int]) -> bool:
    """Whether the rank at `coordinates` runs the node."""
    return all(coordinates[axis] == index for axis, index in info_of(node).owner.items())


def graph_of_rank(graph: Graph, coordinates: Mapping[str, int]) -> Graph:
    """The graph that the rank at `coordinates` runs.

    It differs from the graph of all ranks only if parameters are on one rank of an axis: those of a parallel branch,
    which the user put there, or of an expert. Other ranks leave out what is computed from them alone, and read zeros
    where a branch joins the rest, or their own part (`own_part`). An output that they lack is None.
    """
    if not any(info_of(node).owner for node in graph.nodes):
        return graph
    copy = Graph()
    copied: dict[Node, Node] = {}
    result = copy.graph_copy(graph, copied)
    copy.output(result)
    elsewhere = [n for n in copy.nodes if n.op != "output" and not runs_on(n, coordinates)]
    for node in list(copy.nodes):
        if node.target is own_part:
            (mine,) = (part for part in node.all_input_nodes if part not in elsewhere)
            node.replace_all_uses_with(mine)
            copy.erase_node(node)
    end = output_node(copy)
    (results,) = end.args
    end.args = (tuple(None if r in elsewhere else r for r in results),)  # type: ignore[union-attr]
    for node in reversed(elsewhere):
        readers = [user for user in node.users if user not in elsewhere]
        if readers and is_tensor(node):
            value = node.meta["val"]
            with copy.inserting_after(node):
                zeros = copy.call_function(
                    torch.ops.aten.zeros.default, (list(value.shape),), {"dtype": value.dtype, "device": value.device}
                )
            describe(zeros, NodeInfo(), value)
            for reader in readers:
                reader.replace_input_with(node, zeros)
    for node in reversed(elsewhere):
        if node.op != "placeholder" and not node.users:
            copy.erase_node(node)
    copy.lint()
    return copy
