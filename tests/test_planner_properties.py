"""What must hold of every prediction and of every search, whatever the plan: no torch, pure values."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan_choices import choices_of

from plait.cost.plan_search import search
from plait.cost.shape_evaluator import ShapeEvaluator
from plait.cost.transformer import TransformerShape
from plait.cost.transformer_simulation import SimulatedStep, misses_by, program_of, simulate_step
from plait.cost.transformer_step import estimate_step
from plait.errors import PlanError
from plait.plan.legality import refusals
from plait.plan.parallelism import Parallelism
from plait.plan.plan import Plan
from plait.plan.plan_space import Limits, PlanChoice, plan_of
from plait.plan.step_facts import StepFacts
from plait.spec.cluster import Cluster, EfficiencyCurve
from plait.spec.cluster_file import find_cluster

DENSE = TransformerShape(8, 512, 8, 50257, 256, dropout=False, stores_scores=False)
GROUPED = TransformerShape(
    12, 1024, 16, 32000, 512, 2816, 4, gated=True, biases=False, tied=False, learned_positions=False, dropout=False,
    stores_scores=False,
)  # fmt: skip
EXPERTS = replace(GROUPED, num_experts=8, experts_per_token=2)
SHAPES = {"dense": DENSE, "grouped": GROUPED, "experts": EXPERTS}
CLUSTERS = ("h100x8", "v100x16", "tpu-v5ex16", "two-sites", "xeon-2core")
ROWS = 32
ALMOST = 1 - 1e-9


@functools.cache
def choices(shape: str, cluster: str) -> list[PlanChoice]:
    """Plans of all kinds for all devices of a cluster; of them one in several."""
    where = find_cluster(cluster)
    limits = Limits.parse("compress=none,int8 expert.capacity=1.25 micro=1,4,16")
    space = ShapeEvaluator(SHAPES[shape], where).space(where.num_devices, (ROWS,), limits)
    return choices_of(space)[::7]


@st.composite
def cases(draw: st.DrawFn) -> tuple[str, str, str]:
    """(shape, plan, cluster), as texts."""
    shape, cluster = draw(st.sampled_from(sorted(SHAPES))), draw(st.sampled_from(CLUSTERS))
    found = choices(shape, cluster)
    return shape, str(plan_of(found[draw(st.integers(0, len(found) - 1))].how)), cluster


def values(case: tuple[str, str, str]) -> tuple[TransformerShape, Plan, Cluster]:
    shape, plan, cluster = case
    return SHAPES[shape], Plan.parse(plan), find_cluster(cluster)


def step(shape: TransformerShape, plan: Plan, cluster: Cluster, rows: int = ROWS) -> SimulatedStep:
    return simulate_step(shape, plan, rows, cluster)


def with_links(cluster: Cluster, level: int, latency: float = 1.0, bandwidth: float = 1.0) -> Cluster:
    """The cluster with a link whose latency and bandwidth are so many times what they were."""
    links = list(cluster.links)
    link = links[level % len(links)]
    links[level % len(links)] = replace(link, latency=link.latency * latency, bandwidth=link.bandwidth * bandwidth)
    return replace(cluster, links=tuple(links))


def with_device(cluster: Cluster, speed: float) -> Cluster:
    """The cluster with devices that are so many times as fast in all."""
    device = cluster.device
    return replace(
        cluster,
        device=replace(
            device,
            peak=tuple((dtype, speed * peak) for dtype, peak in device.peak),
            memory_bandwidth=speed * device.memory_bandwidth,
            op_seconds=device.op_seconds / speed,
        ),
    )


@given(cases(), st.integers(0, 2), st.floats(1.01, 100.0))
def test_a_link_with_a_longer_latency_makes_no_step_shorter(
    case: tuple[str, str, str], level: int, factor: float
) -> None:
    shape, plan, cluster = values(case)
    slower = step(shape, plan, with_links(cluster, level, latency=factor))
    assert slower.seconds >= ALMOST * step(shape, plan, cluster).seconds


@given(cases(), st.integers(0, 2), st.floats(0.01, 0.99))
def test_a_link_with_less_bandwidth_makes_no_step_shorter(
    case: tuple[str, str, str], level: int, factor: float
) -> None:
    shape, plan, cluster = values(case)
    slower = step(shape, plan, with_links(cluster, level, bandwidth=factor))
    assert slower.seconds >= ALMOST * step(shape, plan, cluster).seconds


@given(cases(), st.floats(1.01, 20.0))
def test_faster_devices_make_no_step_longer(case: tuple[str, str, str], factor: float) -> None:
    shape, plan, cluster = values(case)
    faster = step(shape, plan, with_device(cluster, factor))
    assert ALMOST * faster.seconds <= step(shape, plan, cluster).seconds


@given(cases(), st.integers(2, 5))
def test_a_larger_batch_takes_no_less_time_and_no_less_memory(case: tuple[str, str, str], times: int) -> None:
    shape, plan, cluster = values(case)
    small, large = step(shape, plan, cluster), step(shape, plan, cluster, times * ROWS)
    assert large.seconds >= ALMOST * small.seconds
    assert large.estimate.peak_memory >= ALMOST * small.estimate.peak_memory
    for kind, num_bytes in small.estimate.host_memory.items():
        assert large.estimate.host_memory[kind] >= ALMOST * num_bytes


@given(cases())
def test_a_plan_is_legal_and_its_line_says_all_of_it(case: tuple[str, str, str]) -> None:
    shape, plan, cluster = values(case)
    assert refusals(plan, StepFacts(rows=ROWS)) == ()
    assert Plan.parse(str(plan)) == plan
    once, again = step(shape, plan, cluster), step(shape, Plan.parse(str(plan)), cluster)
    assert (once.seconds, once.estimate) == (again.seconds, again.estimate)


@given(cases())
def test_no_plan_takes_less_memory_than_its_outline_at_least(case: tuple[str, str, str]) -> None:
    shape, plan, cluster = values(case)
    how = Parallelism.of(plan)
    evaluator = ShapeEvaluator(shape, cluster)
    space = evaluator.space(cluster.num_devices, (ROWS,), Limits())
    outline = Parallelism(
        how.batch, how.weights, how.context, how.pipeline, num_micro=how.num_micro, recompute=how.recompute,
        sequence=how.sequence, precision=how.precision, experts=how.experts, capacity=how.capacity,
    )  # fmt: skip
    least = evaluator.least(space, outline, ROWS, space.homes)
    all_steps = list(evaluator.rough(space, outline, ROWS, space.homes, math.inf, math.inf))
    for each in evaluator.rough(space, outline, ROWS, space.homes, 0.0, math.inf):
        assert least <= each.memory * (1 + 1e-9)
    assert all_steps


def _links(factor: float) -> Callable[[Cluster], Cluster]:
    return lambda cluster: functools.reduce(
        lambda made, level: with_links(made, level, 1 / factor, factor), range(len(cluster.links)), cluster
    )


@pytest.mark.parametrize("limits", ["", "sync=1 pipeline=1", "expert=2..8 micro=1..4"])
@pytest.mark.parametrize("cluster", ["h100x8", "two-sites"])
def test_what_a_search_returns_is_legal_and_the_same_again(cluster: str, limits: str) -> None:
    where, shape = find_cluster(cluster), replace(EXPERTS, layers=4)
    first, again = (
        search(ShapeEvaluator(shape, where), where, (16, 32), Limits.parse(f"context=1 {limits}"), 3e9)
        for _ in range(2)
    )
    every = [*first.best, *first.front]
    assert [(str(each.plan), each.rows) for each in every] == [
        (str(each.plan), each.rows) for each in (*again.best, *again.front)
    ]
    for each in every:
        assert refusals(each.plan, StepFacts(rows=each.rows)) == ()
        assert Plan.parse(str(each.plan)) == each.plan
        assert each.step.misses_by(first.memory) <= 0
        assert step(shape, each.plan, where, each.rows).seconds == pytest.approx(each.step.seconds)


@pytest.mark.parametrize("limits", ["", "zero=1,2 home.activations=device", "home.parameters=device recompute=layer"])
def test_the_nearest_plan_is_nearest_of_all(limits: str) -> None:
    """Against all plans of a space of which none fits."""
    where, shape = find_cluster("h100x8"), replace(DENSE, layers=4)
    given_limits = Limits.parse(f"sync=1 context=1 precision=bf16-params {limits}")
    found = search(ShapeEvaluator(shape, where), where, (ROWS,), given_limits, 1e6)
    assert found.best == () and found.nearest is not None
    space = ShapeEvaluator(shape, where).space(8, (ROWS,), given_limits)
    everything = [plan_of(choice.how) for choice in choices_of(space)]
    assert len(everything) > 2_000
    least = min(_misses(shape, plan, where) for plan in everything[::3])
    assert found.nearest.step.misses_by(1e6) <= least
    assert found.num_rough < len(everything) / 2


def _misses(shape: TransformerShape, plan: Plan, where: Cluster) -> float:
    how = Parallelism.of(plan)
    found = estimate_step(shape, how, ROWS, where, program_of(plan))
    return misses_by(found.peak_memory - 1e6, found.host_memory, where, how.num_ranks, how.homes)


def test_efficiency_never_makes_more_work_shorter() -> None:
    """Of every device that is shipped: an op of more flops or bytes takes no less time."""
    for name in CLUSTERS:
        device = find_cluster(name).device
        for curve in (device.matmul_efficiency, device.memory_efficiency):
            assert isinstance(curve, EfficiencyCurve)
            times = [size / curve.at(size) for size in (10 ** (exponent / 8) for exponent in range(24, 128))]
            assert times == sorted(times), name


def test_a_device_that_is_slower_is_not_chosen_for_speed() -> None:
    """The best of a search is no worse on links and devices that are all twice as fast."""
    where = find_cluster("h100x8")
    faster = _links(2.0)(with_device(where, 2.0))
    scores = []
    for each in (where, faster):
        found = search(ShapeEvaluator(DENSE, each), each, (ROWS,), Limits.parse("sync=1"), None)
        scores.append(found.fitting()[0].score)
    assert scores[1] >= scores[0]
    with pytest.raises(PlanError, match="no plan fits"):
        search(ShapeEvaluator(DENSE, where), where, (ROWS,), Limits.parse("sync=1"), 1e6).fitting()


def test_pipelines_with_fewer_microbatches_than_ranks_are_no_better_than_they_are_simulated() -> None:
    shape = TransformerShape(80, 8192, 64, 128256, 8192, kv_heads=8, ffn=28672, gated=True, stores_scores=False)
    where = find_cluster("h100x512")
    limits = Limits.parse(
        "sync=1 tensor=4 context=2 sequence=yes pipeline=2..8 schedule=1f1b,interleaved recompute=none zero=1..3"
        " precision=bf16-params home.parameters=device home.optimizer=device"
    )
    found = search(ShapeEvaluator(shape, where), where, (64,), limits)
    best = found.best[0]
    assert str(best.plan).startswith("pipeline=8 ") and "chunks=10" in str(best.plan)  # stages of one layer each
    assert all(each.plan.micro >= each.plan.mesh.axis_size("pipeline") for each in found.best[:3])
    assert all(each.seconds >= best.step.seconds for each in found.lost)
