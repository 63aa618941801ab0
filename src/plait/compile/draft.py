"""A step while it is compiled."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch.fx import Graph

from plait.compile.capture.capture import Captured
from plait.compile.compiled import Settled
from plait.compile.rank_program import StepGraph
from plait.compile.sharding.flat_shards import Cut
from plait.compile.sharding.split_share import SplitShare
from plait.compile.stages.split import Pipeline
from plait.plan.annotation import Annotations
from plait.plan.plan import Plan
from plait.plan.sharding_plan import ShardingPlan
from plait.spec.layout import Layout, Placement


@dataclass
class Draft:
    """A step on its way from the graph that was captured to those that ranks run. Passes change it."""

    captured: Captured
    plan: Plan
    annotations: Annotations
    settled: Settled
    parts: dict[str, StepGraph]  # by cell, then by cell and turn; at first one, with the name ""

    # what sharding decides
    chosen: dict[str, tuple[dict[str, Placement], dict[str, str]]] = field(default_factory=dict)  # by axis
    reasons: dict[str, str] = field(default_factory=dict)  # why parameters are whole, by name
    layouts: dict[str, Layout] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    reduce_axes: dict[str, tuple[str, ...]] = field(default_factory=dict)  # over which gradients are summed, by name
    without_rule: set[str] = field(default_factory=set)
    share: SplitShare | None = None

    # what a pipeline decides
    begins: list[float] | None = None  # positions with which its stages begin
    pipeline: Pipeline | None = None

    # how ranks hold parameters
    sharding: ShardingPlan = field(init=False)
    cuts: dict[str, Cut] = field(default_factory=dict)  # of which ranks have parts, by name

    @property
    def graph(self) -> Graph:
        """The only graph, before the step is split."""
        (part,) = self.parts.values()
        return part.graph

    @graph.setter
    def graph(self, graph: Graph) -> None:
        (part,) = self.parts.values()
        part.graph = graph
