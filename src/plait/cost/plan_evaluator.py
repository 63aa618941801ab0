"""PlanEvaluator: what a search for plans asks about a model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

from plait.cost.found_plans import PlannedStep
from plait.cost.transformer_step import CellTimes
from plait.plan.parallelism import Homes, Parallelism
from plait.plan.plan import Plan
from plait.plan.plan_space import Limits, PlanChoice, PlanSpace
from plait.spec.cluster import Cluster

# What a microbatch saves that repeats less than whole layers: bytes that it keeps beside their inputs, and the seconds
# that it does not repeat; ascending.
Relief = tuple[tuple[float, float], ...]


class RoughStep(NamedTuple):
    """The closed forms of a plan: its seconds, its bytes on the device, and the bytes that are `missing` on the device
    or the host; these are at most 0 if the plan fits."""

    choice: PlanChoice
    seconds: float
    memory: float
    missing: float


class PlanEvaluator(Protocol):
    """A model, for a search."""

    def space(self, num_ranks: int, rows: tuple[int, ...], limits: Limits) -> PlanSpace:
        """The plans for so many ranks."""
        ...

    def cells(self, outline: Parallelism, rows: int) -> CellTimes:
        """What a microbatch takes on the rank that computes longest."""
        ...

    def relief(self, outline: Parallelism, rows: int) -> Relief:
        """What a budget of recomputation saves an outline that repeats whole layers; () if closed forms do not say."""
        ...

    def rough(
        self, space: PlanSpace, outline: Parallelism, rows: int, homes: Sequence[Homes], memory: float, most: float
    ) -> Iterator[RoughStep]:
        """Closed forms of all plans of an outline with these homes, except plans that take more than `most` seconds."""
        ...

    def least(self, space: PlanSpace, outline: Parallelism, rows: int, homes: Sequence[Homes]) -> float:
        """Bytes on the device that each plan of an outline with these homes takes at least."""
        ...

    def refine(self, how: Parallelism, rows: int, memory: float, limits: Limits) -> Parallelism:
        """The same plan with the best budget of recomputation and the best buckets."""
        ...

    def simulate(self, plan: Plan, rows: int) -> PlannedStep:
        """The step of a plan. Raises PlanError for a plan that cannot be had."""
        ...

    @property
    def most_simulated(self) -> int:
        """How many plans are worth a simulation."""
        ...

    def on(self, cluster: Cluster) -> PlanEvaluator:
        """The same model on another cluster."""
        ...

    @property
    def divides(self) -> str:
        """What ranks must divide, in words."""
        ...
