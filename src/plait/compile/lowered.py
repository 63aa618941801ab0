"""The result of lowering: what every rank of a plan needs to know about one captured step."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch.fx import Graph

from plait.compile.capture.capture import Captured
from plait.compile.ir.dtypes import dtype_named
from plait.compile.passes.accumulation import turns_of
from plait.compile.sharding.flat_shards import Cut, cuts_of
from plait.compile.sharding.split_share import SplitShare
from plait.compile.stages.split import Pipeline
from plait.plan.plan import Plan
from plait.schedule.readiness import Cell
from plait.spec.layout import Layout


@dataclass(frozen=True)
class Lowered:
    """What every rank of a plan needs to know about one captured step."""

    graphs: dict[str, Graph]  # local; the same for all ranks but for parallel branches (see specialise). By turn, or
    # with a pipeline by cell and turn: F0, B0.first...
    captured: Captured
    plan: Plan
    layouts: dict[str, Layout]  # of parameters, buffers, constants and batch leaves, by name, as the graph reads them
    states: dict[str, Layout]  # of parameters, as the optimizer holds them
    dtypes: dict[str, str]  # in which the graph reads parameters, where that is not their own
    origins: dict[str, str]  # of those of them that are sharded: the annotation or recipe
    without_rule: frozenset[str]  # ops that ran on whole inputs for lack of a rule
    batch_size: int  # of one microbatch
    pipeline: Pipeline | None = None
    share: SplitShare | None = None  # of an axis that splits weights: how much it does

    @property
    def graph(self) -> Graph:
        """The graph of a step's last microbatch, in which gradients are summed over ranks."""
        return self.graphs[self.turns[-1]]

    @property
    def cuts(self) -> dict[str, Cut]:
        """How parameters are cut of which this rank keeps a part, by name."""
        return cuts_of(self.layouts, self.states, self.plan.sharding)

    def dtype_of(self, name: str) -> torch.dtype:
        """Of a parameter, as the model has it."""
        return dtype_named(self.layouts[name].dtype)

    @property
    def turns(self) -> tuple[str, ...]:
        """Which graph runs each microbatch of a step, in order."""
        return turns_of(self.plan.micro, self.graphs.keys())

    def turns_of_cell(self, cell: Cell, num_micro: int) -> tuple[str, ...]:
        """Which graph runs each of so many microbatches that come to a cell of the pipeline on one rank, in order."""
        name = cell_name(cell)
        turns = {graph.partition(".")[2] for graph in self.graphs if graph.partition(".")[0] == name}
        return tuple(f"{name}.{turn}" for turn in turns_of(num_micro, turns))


@dataclass(frozen=True)
class Settled:
    """What the first batch of a model has decided, and is kept for batches of other shapes. None: not decided yet."""

    layouts: Mapping[str, Layout] | None = None  # of parameters
    stages: Mapping[str, tuple[int, ...]] | None = None  # of a pipeline, by parameter
    frozen: Collection[str] | None = None  # parameters that did not train

    def after(self, lowered: Lowered) -> Settled:
        """What is known once this step is lowered."""
        if self.layouts is not None:
            return self
        parameters = {i.name for i in lowered.captured.inputs if i.kind == "parameter"}
        layouts = {name: lowered.layouts[name] for name in parameters}
        stages = None if lowered.pipeline is None else lowered.pipeline.stages
        return Settled(layouts, stages, lowered.captured.frozen)


NOTHING_SETTLED = Settled()


def cell_name(cell: Cell) -> str:
    return f"{cell[0]}{cell[1]}"
