"""The points of scaling curves: the best plan of a strategy for a model on so many GPUs, simulated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from plait.cost.memory_model import human_bytes
from plait.cost.plan_search import search
from plait.cost.shape_evaluator import ShapeEvaluator
from plait.cost.transformer import TransformerShape
from plait.cost.transformer_simulation import SimulatedStep, program_of
from plait.cost.transformer_step import estimate_step
from plait.errors import PlanError
from plait.plan.parallelism import Parallelism
from plait.plan.plan import Plan
from plait.plan.plan_space import Limits
from plait.spec.cluster import Cluster
from plait.spec.cluster_file import find_cluster

ON_DEVICE = "home.parameters=device home.activations=device home.optimizer=device"
ALWAYS = f"precision=bf16-params {ON_DEVICE} expert.capacity=1.25 bucket=100MiB recompute=none,layer,budget"


@dataclass(frozen=True)
class ScaledModel:
    """A model whose curves are drawn.

    Attributes:
        name: in words.
        shape: of it.
        sizes: numbers of GPUs.
        gpus_a_row: GPUs for each row of the batch, in weak scaling.
        rows: of the batch, in strong scaling.
        replica: GPUs of a replica that holds all states, for replicas that go on without one.
        strategies: limits of the search, by name.
    """

    name: str
    shape: TransformerShape
    sizes: tuple[int, ...]
    gpus_a_row: int
    rows: int
    replica: int
    strategies: dict[str, str]


@dataclass(frozen=True)
class ScalePoint:
    """The best plan of a strategy on so many GPUs, or why there is none.

    Attributes:
        gpus: all of which it has.
        rows: of the batch.
        step: of the plan, simulated; None if there is no plan.
        why: there is none.
        strategy: whose plan it is.
    """

    gpus: int
    rows: int
    step: SimulatedStep | None
    why: str = ""
    strategy: str = ""

    @property
    def mfu(self) -> float:
        return 0.0 if self.step is None else self.step.mfu

    @property
    def shares(self) -> dict[str, float]:
        """The parts of the step, by what they are spent on."""
        return {} if self.step is None else {name: part / self.step.seconds for name, part in self.step.parts.items()}


@dataclass(frozen=True)
class _ClosedForms(ShapeEvaluator):
    """Candidates by closed forms alone, bubbles too: a schedule of 128 ranks takes seconds to simulate."""

    @property
    def most_simulated(self) -> int:
        return 12

    def simulate(self, plan: Plan, rows: int) -> SimulatedStep:
        how, program = Parallelism.of(plan), program_of(plan)
        if plan.schedule in ("zb-v", "dualpipe-v"):
            how = replace(how, chunks=2)
        found = estimate_step(self.shape, how, rows, self.cluster, program)
        cells = self.cells(how, rows)  # of whole layers, cut as evenly as they can be
        found = replace(
            found,
            compute=how.num_micro * cells.compute,
            weights=how.num_micro * cells.weights,
            messages=how.num_micro * cells.messages,
            bubble=cells.wait(how),
        )
        return SimulatedStep(plan, self.cluster, rows, rows * self.shape.sequence, program.dtype, found)


def best_plan(model: ScaledModel, cluster: Cluster, rows: int, limits: str, strategy: str = "") -> ScalePoint:
    """The best plan within limits that has all devices of a cluster: chosen by closed forms, then simulated."""
    gpus = cluster.num_devices
    try:
        found = search(
            _ClosedForms(model.shape, cluster), cluster, (rows,), Limits.parse(f"{ALWAYS} {limits}"), smaller=False
        )
    except PlanError:
        return ScalePoint(gpus, rows, None, f"{rows:,} rows, the weights and the layers cannot be cut so", strategy)
    if found.best:
        best = found.best[0]
        step = ShapeEvaluator(model.shape, cluster).simulate(best.plan, rows)
        return ScalePoint(gpus, rows, step, "", strategy)
    assert found.nearest is not None
    missing = human_bytes(found.nearest.step.misses_by(found.memory))
    return ScalePoint(gpus, rows, None, f"the nearest plan misses by {missing} a GPU", strategy)


def best_of(curves: dict[str, list[ScalePoint]]) -> list[ScalePoint]:
    """The best point of all strategies for each number of GPUs."""
    return [max(points, key=lambda each: each.mfu) for points in zip(*curves.values(), strict=True)]


def where_it_breaks(points: Sequence[ScalePoint], part: float = 0.9) -> str:
    """Where a curve leaves `part` of its best MFU behind, and what the step is then spent on; "" if it never does."""
    having = [point for point in points if point.step is not None]
    if not having:
        return f"nowhere a plan: {points[-1].why}"
    best = max(having, key=lambda each: each.mfu)
    after = [point for point in points if point.gpus > best.gpus]
    broken = next((point for point in after if point.mfu < part * best.mfu), None)
    if broken is None:
        return ""
    if broken.step is None:
        return f"at {broken.gpus:,}: {broken.why}"
    last = next((point for point in after if point.step is None), None)
    ends = f"; no plan from {last.gpus:,} on: {last.why}" if last is not None else ""
    return f"at {broken.gpus:,}: {spent_more(best, broken)}{ends}"


def spent_more(before: ScalePoint, after: ScalePoint) -> str:
    """What a point spends more of its step on than another."""
    name = max(after.shares, key=lambda each: after.shares[each] - before.shares.get(each, 0.0))
    if name == "compute":  # smaller products, or repeated ones
        return f"compute reaches less of the peak; it takes {after.shares[name]:.0%} of the step"
    return f"{name} take {after.shares[name]:.0%} of the step, not {before.shares.get(name, 0.0):.0%}"


GPU = "h100"

_ROPE = {"gated": True, "biases": False, "tied": False, "learned_positions": False, "dropout": False,
         "stores_scores": False}  # fmt: skip
_TENSOR, _STAGES = "tensor=2..16 sequence=yes", "pipeline=2..128"
_SPLIT, _PLAIN = "schedule=zb-v,zb-h1,dualpipe-v", "schedule=1f1b,interleaved"
ZERO_BUBBLE = "tensor, zero bubble, ZeRO-1"
DENSE = ScaledModel(
    "dense 1T",
    TransformerShape(128, 24576, 192, 128256, 8192, 86016, 16, **_ROPE),
    tuple(2**power for power in range(11, 18)),
    8,
    2048,
    2048,
    {
        "ZeRO-3 (FSDP), with context": "sync=1 tensor=1 pipeline=1 zero=3 context=1..16",
        "ZeRO-3 with tensor": f"sync=1 {_TENSOR} pipeline=1 zero=3 context=1",
        "tensor, 1F1B or interleaved, ZeRO-1": f"sync=1 {_TENSOR} {_STAGES} zero=1 {_PLAIN} context=1",
        ZERO_BUBBLE: f"sync=1 {_TENSOR} {_STAGES} zero=1 {_SPLIT} context=1",
    },
)
MOE = ScaledModel(
    "MoE 10T",
    TransformerShape(128, 12288, 96, 128256, 8192, 8192, 8, num_experts=256, experts_per_token=8, **_ROPE),
    tuple(2**power for power in range(12, 18)),
    4,
    8192,
    8192,
    {
        "without ranks of experts": "sync=1 expert=1 zero=3 context=1",
        "experts, ZeRO-3": "sync=1 expert=8..256 pipeline=1 zero=3 context=1",
        "experts, 1F1B or interleaved, ZeRO-3": f"sync=1 expert=8..256 {_STAGES} zero=3 {_PLAIN} context=1",
        "experts, zero bubble, ZeRO-3": f"sync=1 expert=8..256 {_STAGES} zero=3 {_SPLIT} context=1",
    },
)
MODELS = (DENSE, MOE)


def cluster_of(gpus: int) -> Cluster:
    return find_cluster(f"{GPU}x{gpus}")


@dataclass(frozen=True)
class Curves:
    """The curves of a model by strategy, where the batch grows with the GPUs (weak) and where it stays (strong)."""

    model: ScaledModel
    weak: dict[str, list[ScalePoint]]
    strong: dict[str, list[ScalePoint]]

    @classmethod
    def of(cls, model: ScaledModel) -> Curves:
        def curve(name: str, limits: str, weak: bool) -> list[ScalePoint]:
            rows = [size // model.gpus_a_row if weak else model.rows for size in model.sizes]
            return [
                best_plan(model, cluster_of(size), num, limits, name)
                for size, num in zip(model.sizes, rows, strict=True)
            ]

        weak, strong = (
            {name: curve(name, limits, kind) for name, limits in model.strategies.items()} for kind in (True, False)
        )
        return cls(model, weak, strong)
