"""A step before, during and after its compilation: what is settled already, the draft, and the result."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from torch.fx import Graph

from plait.compile.capture.captured import Captured
from plait.compile.rank_program import RankProgram, StepGraph
from plait.compile.sharding.flat_shards import Cut
from plait.compile.sharding.sharded_fraction import ShardedFraction
from plait.compile.stages.split import Pipeline
from plait.plan.annotation import Annotations
from plait.plan.plan import Plan
from plait.plan.sharding_plan import ShardingPlan
from plait.spec.cluster import Cluster
from plait.spec.layout import Layout, Placement


@dataclass(frozen=True)
class Compiled:
    """The program that ranks run, and the choices that `explain` shows.

    origins       the annotation or search that sharded each parameter, by name
    without_rule  ops that run on whole inputs because they have no rule
    share         the fraction of the step that an axis such as tensor splits; None without an axis that splits weights
    whole_sequences  ops that read whole sequences where an axis cuts these, with their modules, the most bytes first
    whole_loops   modules with loops over positions that every rank runs whole, each with the calls that are why
    """

    program: RankProgram
    origins: dict[str, str]
    without_rule: frozenset[str]
    share: ShardedFraction | None = None
    whole_sequences: tuple[str, ...] = ()
    whole_loops: tuple[str, ...] = ()


@dataclass(frozen=True)
class Settled:
    """Decisions of the first batch that batches of other shapes keep. A field is None until it is decided."""

    layouts: Mapping[str, Layout] | None = None  # of parameters
    stages: Mapping[str, tuple[int, ...]] | None = None  # of each parameter, with a pipeline
    frozen: Collection[str] | None = None  # parameters that did not train

    def after(self, program: RankProgram) -> Settled:
        """The decisions after a step is compiled to `program`."""
        if self.layouts is not None:
            return self
        layouts = {name: each.compute for name, each in program.sharding.parameters.items()}
        stages = None if program.pipeline is None else program.pipeline.stages
        return Settled(layouts, stages, program.captured.frozen)


NOTHING_SETTLED = Settled()


@dataclass
class Draft:
    """A step between the captured graph and the graphs that ranks run. Passes change it."""

    captured: Captured
    plan: Plan
    annotations: Annotations
    settled: Settled
    parts: dict[str, StepGraph]  # one named "" at first, then by cell, then by cell and accumulation
    cluster: Cluster

    # what sharding decides
    chosen: dict[str, tuple[dict[str, Placement], dict[str, str]]] = field(default_factory=dict)  # by axis
    reasons: dict[str, str] = field(default_factory=dict)  # why parameters are whole, by name
    layouts: dict[str, Layout] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    reduce_axes: dict[str, tuple[str, ...]] = field(default_factory=dict)  # over which gradients are summed, by name
    without_rule: set[str] = field(default_factory=set)
    share: ShardedFraction | None = None
    whole_sequences: tuple[str, ...] = ()  # what reads whole sequences of an axis that cuts these, the most bytes first
    whole_loops: tuple[str, ...] = ()  # modules with loops that such an axis does not cut, and why

    # what a pipeline decides
    begins: list[float] | None = None  # positions with which its stages begin
    pipeline: Pipeline | None = None

    # how ranks hold parameters
    sharding: ShardingPlan = field(init=False)
    cuts: dict[str, Cut] = field(default_factory=dict)  # of parameters of which ranks have parts, by name

    @property
    def trains(self) -> bool:
        """Whether the step computes gradients."""
        return any(output.kind == "gradient" for output in self.captured.outputs)

    @property
    def graph(self) -> Graph:
        """The graph of the step, as long as it is the only one."""
        (part,) = self.parts.values()
        return part.graph

    @graph.setter
    def graph(self, graph: Graph) -> None:
        (part,) = self.parts.values()
        part.graph = graph
