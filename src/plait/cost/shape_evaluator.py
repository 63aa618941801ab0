"""A transformer's shape, for a search: which plans divide it, their closed forms, their simulated steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from plait.cost.outline_search import least_on_device, rough_steps
from plait.cost.plan_evaluator import PlanEvaluator, Relief, RoughStep
from plait.cost.transformer import TransformerShape
from plait.cost.transformer_memory import kept_bytes, least_budget, logits_bytes, memory_of_rank
from plait.cost.transformer_simulation import BUCKETS, SimulatedStep, misses_by, program_in, simulate_step
from plait.cost.transformer_step import CellTimes, StateTimes, cell_times, estimate_step, state_times
from plait.plan.parallelism import ALTERNATE, BUDGET, FULL, NONE, Homes, Parallelism
from plait.plan.plan import Plan
from plait.plan.plan_space import Limits, PlanSpace
from plait.spec.cluster import Cluster

_MOST_ACTIONS = 4_000  # of a schedule that is simulated whole
_BUDGET_STEPS = 8  # halvings, in the search for the largest budget that fits


@dataclass(frozen=True)
class ShapeEvaluator:
    """Plans of a decoder of this shape on a cluster, with the data types that its devices are made for."""

    shape: TransformerShape
    cluster: Cluster

    @property
    def most_simulated(self) -> int:
        """How many plans are worth a simulation, which takes a fraction of a second."""
        return 40

    def on(self, cluster: Cluster) -> PlanEvaluator:
        """The same shape on another cluster."""
        return ShapeEvaluator(self.shape, cluster)

    @property
    def divides(self) -> str:
        """What ranks must divide, in words."""
        shape = self.shape
        return (
            f"{shape.heads} heads and {shape.groups} key-value heads, {shape.sequence} positions or the"
            f" {shape.layers} layers"
        )

    def space(self, num_ranks: int, rows: tuple[int, ...], limits: Limits) -> PlanSpace:
        """The plans for so many ranks."""
        peaks = dict(self.cluster.device.peak)
        halves = [word for word, dtype in (("bf16", "bfloat16"), ("fp16", "float16")) if dtype in peaks]
        words = [f"{halves[0]}-params", halves[0]] if halves and self.cluster.device.overlaps else []
        return PlanSpace(
            num_ranks, rows, self.cluster.sizes, self.shape.layers, (self.shape.heads, self.shape.groups),
            self.shape.sequence, (*words, "fp32"), self.cluster.has_host_memory, limits,
            experts=self.shape.num_experts,
        )  # fmt: skip

    def cells(self, outline: Parallelism, rows: int) -> CellTimes:
        """What a microbatch takes on the rank that computes longest."""
        program = program_in(outline.precision)
        return cell_times(self.shape, outline, rows, self.cluster, program, whole_layers=True)

    def kept(self, outline: Parallelism, rows: int) -> tuple[float, float]:
        """Bytes that a microbatch keeps on its ranks for backward: of all layers, and of one."""
        micro_rows = rows / (outline.batch * outline.num_micro * outline.context)
        layer = kept_bytes(self.shape, outline, micro_rows, program_in(outline.precision), outline.recompute)
        return self.shape.layers * layer, layer

    def relief(self, outline: Parallelism, rows: int) -> Relief:
        """What a budget of recomputation saves a microbatch: what lies between the kinds that repeat all of a layer,
        every other product, and nothing."""
        kinds = [outline.having(recompute=kind) for kind in (FULL, ALTERNATE, NONE)]
        points = [(self.kept(each, rows)[0], self.cells(each, rows).seconds) for each in kinds]
        least, longest = points[0]
        return tuple((kept - least, longest - seconds) for kept, seconds in points[1:] if kept > least)

    def states(self, how: Parallelism, rows: int, cells: CellTimes) -> StateTimes:
        """What sums of gradients, the update, copies and exchanges take."""
        return state_times(self.shape, how, rows, self.cluster, program_in(how.precision), cells)

    def least_memory(self, how: Parallelism, rows: int) -> tuple[dict[str, float], dict[str, float]]:
        """Bytes by class on the device and outside it, without the activations of microbatches in flight."""
        return memory_of_rank(self.shape, how, rows, program_in(how.precision), 0.0)

    def rough(
        self, space: PlanSpace, outline: Parallelism, rows: int, homes: Sequence[Homes], memory: float, most: float
    ) -> Iterator[RoughStep]:
        """Closed forms of all plans of an outline with these homes, except plans that take more than `most` seconds."""
        return rough_steps(self, space, outline, rows, homes, memory, most)

    def least(self, space: PlanSpace, outline: Parallelism, rows: int, homes: Sequence[Homes]) -> float:
        """Bytes on the device that each plan of an outline with these homes takes at least."""
        return least_on_device(self, space, outline, rows, homes)

    def refine(self, how: Parallelism, rows: int, memory: float, limits: Limits) -> Parallelism:
        """The same plan with the best budget of recomputation and the best buckets."""
        found = [replace(how, bucket=size) for size in limits.sizes("bucket") or BUCKETS]
        if how.recompute == FULL and limits.allow("recompute", "budget"):
            found += [budgeted for each in found if (budgeted := self._with_budget(each, rows, memory)) is not None]
        return min(found, key=lambda each: round(self._seconds(each, rows), 4))

    def _seconds(self, how: Parallelism, rows: int) -> float:
        return estimate_step(self.shape, how, rows, self.cluster, program_in(how.precision)).seconds

    def _with_budget(self, how: Parallelism, rows: int, memory: float) -> Parallelism | None:
        """The plan that repeats as little as fits; None if whole layers must be repeated."""
        program = program_in(how.precision)
        micro_rows = rows / (how.batch * how.num_micro * how.context)
        least = least_budget(self.shape, how, micro_rows, program)
        kept = self.shape.layers * kept_bytes(self.shape, how, micro_rows, program, NONE)
        fits, too_much = 0.0, kept + logits_bytes(self.shape, how, micro_rows, program)
        for _ in range(_BUDGET_STEPS):
            middle = (max(fits, least) + too_much) / 2
            tried = replace(how, recompute=BUDGET, budget=int(middle))
            taken, away = memory_of_rank(self.shape, tried, rows, program)
            if misses_by(sum(taken.values()) - memory, away, self.cluster, how.num_ranks, how.homes) <= 0:
                fits = middle
            else:
                too_much = middle
        unit = 2**20 if fits < 2**34 else 2**28
        budget = int(fits) // unit * unit
        return replace(how, recompute=BUDGET, budget=budget) if budget >= least else None

    def simulate(self, plan: Plan, rows: int) -> SimulatedStep:
        """The step of a plan, of long schedules their first rounds."""
        return simulate_step(self.shape, plan, rows, self.cluster, most_actions=_MOST_ACTIONS)
