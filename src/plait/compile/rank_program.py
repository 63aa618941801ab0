"""A rank program: what the ranks of a plan run in a step, as functional graphs of tensors.

A graph takes tensors and gives tensors: nothing is written in place, and a collective is one call from a tensor to a
tensor (compile/ops/comm_ops.py). When a collective begins, which of them travel together, and where tensors are kept
between two uses is for a backend to say (backends/backend.py).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch.fx import Graph

from plait.compile.capture.capture import Captured, Output
from plait.compile.ir.dtypes import dtype_named
from plait.compile.sharding.flat_shards import Cut
from plait.compile.stages.split import Pipeline
from plait.plan.plan import Plan
from plait.plan.sharding_plan import ShardingPlan
from plait.schedule.readiness import Cell
from plait.spec.layout import Layout


@dataclass
class StepGraph:
    """One of the graphs of a step: all of it, a cell of its pipeline, or what a cell runs for some microbatches."""

    graph: Graph
    outputs: tuple[Output, ...]
    num_micro: frozenset[int]  # on how many microbatches ranks run it in a step
    cell: Cell | None = None  # of a pipeline
    turn: str = ""  # which of them, once the step is repeated

    @property
    def gradients(self) -> dict[int, str]:
        """The parameters whose gradients the graph makes, by its outputs."""
        return {i: output.name for i, output in enumerate(self.outputs) if output.kind == "gradient"}


@dataclass(frozen=True, eq=False)
class RankProgram:
    """The graphs of a step, which are the same for all ranks but for parallel branches (compile/stages/specialise.py),
    and what the values are that go in and come out.

    graphs    by turn of accumulation (turns_of), or with a pipeline by cell and turn: F0.alone, B0.first...
    layouts   of parameters, buffers, constants and batch leaves, by name, as the graphs read them
    sharding  how the ranks hold each parameter
    cuts      how parameters are cut of which a rank keeps a part, by name
    """

    graphs: dict[str, StepGraph]
    captured: Captured
    plan: Plan
    layouts: dict[str, Layout]
    sharding: ShardingPlan
    cuts: dict[str, Cut]
    pipeline: Pipeline | None = None

    def dtype_of(self, name: str) -> torch.dtype:
        """Of a parameter, as the model has it."""
        return dtype_named(self.sharding.parameters[name].state.dtype)

    @property
    def turns(self) -> tuple[str, ...]:
        """Which graph runs each microbatch of a step, in order."""
        return turns_of(self.plan.micro, self.graphs.keys())

    def turns_of_cell(self, cell: Cell, num_micro: int) -> tuple[str, ...]:
        """Which graph runs each of so many microbatches that come to a cell of the pipeline on one rank, in order."""
        turns = {each.turn for each in self.graphs.values() if each.cell == cell}
        return tuple(f"{cell_name(cell)}.{turn}" for turn in turns_of(num_micro, turns))

    def of_cells(self, graphs: Mapping[str, Graph]) -> dict[Cell, Graph]:
        """Of graphs by the names of the program's own, those of each cell's last microbatch."""
        assert self.pipeline is not None
        cells = [(cell, max(self.pipeline.num_micro(cell), default=0)) for cell in self.pipeline.cells.graphs]
        return {cell: graphs[self.turns_of_cell(cell, num)[-1]] for cell, num in cells}


def turns_of(num_micro: int, graphs: Collection[str]) -> tuple[str, ...]:
    """The graph of each microbatch in turn, of those that there are (compile/passes/accumulation.py)."""
    if "first" not in graphs or num_micro == 1:
        return ("alone", *["more" if "more" in graphs else "alone"] * (num_micro - 1))
    return ("first", *["middle"] * (num_micro - 2), "last")


def cell_name(cell: Cell) -> str:
    return f"{cell[0]}{cell[1]}"
