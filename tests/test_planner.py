"""plait plan: the space of legal plans, the search through it, and what is said where nothing fits."""

from __future__ import annotations

import functools
from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import memory_ranks
import pytest
import torch
from plan_choices import choices_of
from typer.testing import CliRunner

import plait
from plait.api.cli import app
from plait.api.job.gpt import loss_fn
from plait.api.job.metrics import measured_noise, read_steps
from plait.api.plan_model import ModelEvaluator
from plait.cost.found_plans import RELAXED_WORTH, USABLE, Candidate, FoundPlans, Goal, best_between
from plait.cost.memory_model import StateBytes
from plait.cost.model_forms import ModelForms, PrecisionForms
from plait.cost.noise_scale import NoiseScale
from plait.cost.outline_search import devices_enough
from plait.cost.plan_search import search
from plait.cost.shape_evaluator import ShapeEvaluator
from plait.cost.transformer import TransformerShape
from plait.cost.transformer_simulation import simulate_step
from plait.errors import PlaitError, PlanError
from plait.plan.legality import refusals
from plait.plan.parallelism import FULL, NONE, Parallelism
from plait.plan.plan import Plan
from plait.plan.plan_space import Limits, PlanSpace, batch_sizes, plan_of
from plait.plan.step_facts import StepFacts
from plait.report.plan_text import describe_plans
from plait.spec.cluster import Cluster
from plait.spec.cluster_file import find_cluster

EXAMPLES = Path(__file__).parent.parent / "examples"
GPT = TransformerShape(16, 2048, 16, 50257, 1024, dropout=False, stores_scores=False)
LLAMA_7B = TransformerShape(
    32, 4096, 32, 32000, 4096, ffn=11008, gated=True, biases=False, tied=False, learned_positions=False, dropout=False,
    stores_scores=False,
)  # fmt: skip


def found(
    shape: TransformerShape, cluster: str | Cluster, rows: int, limits: str = "", memory: float | None = None
) -> FoundPlans:
    where = find_cluster(cluster) if isinstance(cluster, str) else cluster
    return search(ShapeEvaluator(shape, where), where, (rows,), Limits.parse(limits), memory)


def test_all_plans_of_a_space_are_legal_and_say_what_they_are() -> None:
    space = PlanSpace(8, (16,), (4, 8), 4, (8, 8), 64, ("bf16-params", "fp32"), True)
    of_all = choices_of(space)
    assert len(of_all) > 20_000
    for choice in islice(of_all, 0, None, 37):
        how = choice.how
        plan = plan_of(how)
        assert plan.num_processes == 8
        assert not refusals(plan, StepFacts(rows=16)), plan
        again = Parallelism.of(Plan.parse(str(plan)))
        chunks = how.chunks if how.schedule in ("interleaved", "looped-bfs") else 1  # others have a fixed number
        schedule = how.schedule if how.pipeline > 1 else "1f1b"
        assert again == replace(how, chunks=chunks, schedule=schedule)


def test_many_microbatches_are_searched_where_they_have_few_rows() -> None:
    space = PlanSpace(8, (2**16,), (8,), 8, (8,), 1, ("fp32",), False, Limits.parse("pipeline=2 tensor=1"))
    assert {rows // how.batch // how.num_micro for rows, how in space.outlines() if how.num_micro > 128} == {1, 2, 4, 8}
    named = PlanSpace(8, (2**16,), (8,), 8, (8,), 1, ("fp32",), False, Limits.parse("pipeline=2 tensor=1 micro=256"))
    assert {how.num_micro for _, how in named.outlines()} == {256}


def test_experts_are_spread_over_ranks_of_data() -> None:
    limits = Limits.parse("expert.capacity=1.25 micro=1 sync=1")
    space = PlanSpace(8, (16,), (8,), 2, (8,), 64, ("fp32",), False, limits, experts=4)
    found = choices_of(space)
    assert {choice.how.experts for choice in found} == {1, 2, 4}
    for choice in found[::5]:
        plan = plan_of(choice.how)
        assert plan.num_processes == 8
        again = Parallelism.of(Plan.parse(str(plan)))
        assert (again.experts, again.batch, again.sharded) == (choice.how.experts, choice.how.batch, choice.how.sharded)
        assert again.capacity == (1.25 if again.experts > 1 else 0.0)


def test_a_space_has_every_key_that_is_searched() -> None:
    space = PlanSpace(8, (32,), (4, 8), 4, (8, 8), 64, ("bf16-params", "fp32"), True)
    plans = [str(plan_of(choice.how)) for choice in choices_of(space)[::11]]
    words = {word.partition("=")[0] for plan in plans for word in plan.split()}
    assert words >= {
        "data", "replica", "tensor", "sequence", "context", "pipeline", "schedule", "chunks", "zero", "micro",
        "recompute", "precision", "home.parameters", "home.activations", "home.optimizer", "sync", "outer",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("limits", "kept"),
    [
        ("tensor=1..2 pipeline=1", lambda plan: plan.tensor <= 2 and plan.pipeline == 1),
        ("zero=1,3 sync=1", lambda plan: plan.zero in (1, 3) and plan.sync == 1),
        ("precision=fp16-params recompute=layer", lambda plan: plan.precision == "fp16-params"),
        ("schedule=zb-v pipeline=2..8", lambda plan: plan.schedule == "zb-v" and plan.pipeline > 1),
        ("home.optimizer=host", lambda plan: plan.home_optimizer == "host"),
        ("sync=64 compress=int8", lambda plan: plan.sync == 64 and str(plan.compress) == "int8"),
        ("compress=int8", lambda plan: str(plan.compress) == "int8"),
        (
            "recompute=none,budget bucket=7MiB expert.capacity=1.25",
            lambda plan: plan.recompute.kind in ("none", "budget"),
        ),
        ("data=4 replica=2", lambda plan: (plan.data, plan.replica) == (4, 2)),
        ("micro=2 context=2", lambda plan: plan.micro == 2 and plan.mesh.axis_size("context") == 2),
    ],
)
def test_limits(limits: str, kept: object) -> None:
    space = PlanSpace(8, (32,), (4, 8), 4, (8, 8), 64, ("bf16-params",), True, Limits.parse(limits))
    plans = [plan_of(choice.how) for choice in choices_of(space)[::3]]
    assert plans
    assert callable(kept)
    assert all(kept(plan) for plan in plans)


def test_no_plan_of_all_is_better() -> None:
    """Against every plan of a small space, each simulated."""
    node = find_cluster("h100x8")
    limits = Limits.parse("micro=1,4 sync=1 home.parameters=device home.activations=device home.optimizer=device"
                          " precision=bf16-params recompute=none,layer context=1 sequence=no")  # fmt: skip
    evaluator = ShapeEvaluator(GPT, node)
    best = search(evaluator, node, (64,), limits).best[0]
    space = evaluator.space(8, (64,), limits)
    every = []
    for choice in choices_of(space):
        step = simulate_step(GPT, plan_of(choice.how), 64, node)
        if step.misses_by(USABLE * node.device.memory) <= 0:
            every.append(step)
    assert len(every) > 200
    fastest = min(every, key=lambda each: each.seconds)
    assert best.step.seconds <= fastest.seconds * 1.001, (best.plan, fastest.plan)


def test_plans_with_experts_are_ranked_by_the_budget_that_they_get() -> None:
    """Against plans with the states of Mixtral 8x7B on the host, which neither repeat all layers nor none."""
    shape = TransformerShape(
        32, 4096, 32, 32000, 4096, 14336, 8, gated=True, biases=False, tied=False, learned_positions=False,
        dropout=False, stores_scores=False, num_experts=8, experts_per_token=2,
    )  # fmt: skip
    node = find_cluster("h100x8")
    limits = "sync=1 precision=bf16-params expert.capacity=1.25 pipeline=1"
    found_best = found(shape, node, 64, limits).best[0]
    assert found_best.plan.recompute.kind == "budget"
    rest = "micro=4 precision=bf16-params home.parameters=host home.optimizer=host"
    for first in ("data=8", *(f"data=8 expert={size} expert.capacity=1.25" for size in (2, 4, 8))):
        for zero in (1, 3):
            for budget in (48, 52, 56, 60, 64, 65):
                plan = Plan.parse(f"{first} zero={zero} recompute=budget={budget}GiB {rest}")
                step = simulate_step(shape, plan, 64, node)
                if step.misses_by(USABLE * node.device.memory) <= 0:
                    assert found_best.step.seconds <= step.seconds * 1.001, plan


def test_the_same_input_has_the_same_answer() -> None:
    first, again = (found(GPT, "a100x16", 64, "micro=2..8 context=1 sync=1") for _ in range(2))
    assert [str(each.plan) for each in first.best] == [str(each.plan) for each in again.best]
    assert [str(each.plan) for each in first.front] == [str(each.plan) for each in again.front]
    assert [each.why for each in first.lost] == [each.why for each in again.lost]


def test_the_best_come_first_and_the_front_has_nothing_better() -> None:
    node = found(GPT, "h100x8", 64)
    scores = [each.score for each in node.best]
    assert scores == sorted(scores, reverse=True)
    for earlier, later in zip(node.front, node.front[1:], strict=False):
        assert earlier.score >= later.score
        assert earlier.memory > later.memory
    assert node.front[0].plan == node.best[0].plan
    assert all(each.step.misses_by(node.memory) <= 0 for each in (*node.best, *node.front))
    assert {each.name for each in node.lost} >= {"data parallel (DDP)", "Megatron-LM: tensor, 1F1B, data"} - {
        "data parallel (DDP)" if node.best[0].plan.zero == 0 else ""
    }


def test_less_memory_has_another_plan() -> None:
    rich, poor = found(GPT, "h100x8", 64), found(GPT, "h100x8", 64, memory=6e9)
    assert poor.best[0].memory <= 6e9
    assert poor.best[0].score < rich.best[0].score
    assert any("does not fit" in each.why for each in poor.lost)


def test_slow_lines_between_sites_are_left_to_replicas_that_agree_later() -> None:
    far = found(LLAMA_7B, "two-sites", 64, "micro=2..8 context=1")
    best = far.best[0].plan
    assert best.relaxed_axis == "replica"
    assert best.replica == 2
    assert far.best[0].score == pytest.approx(RELAXED_WORTH * far.best[0].step.tokens_per_second)
    together = [each for each in far.best if not each.plan.relaxed_axis]
    assert all(each.score < far.best[0].score for each in together)
    near = found(LLAMA_7B, "h100x16", 64, "micro=2..8 context=1")
    assert not near.best[0].plan.relaxed_axis
    one_site = found(LLAMA_7B, "two-sites", 64, "sync=1 micro=2..8 context=1").best[0]
    assert one_site.plan.num_processes == 8  # the line costs more than the other site gives


def test_what_does_not_fit_a_device_goes_to_its_host() -> None:
    shape = TransformerShape(40, 5120, 40, 50257, 2048, stores_scores=False)
    one = found(shape, "v100x1", 16, "micro=4..16")
    best = one.best[0].plan
    assert best.home_parameters == best.home_optimizer == "host"
    assert one.best[0].step.misses_by(one.memory) <= 0


def test_a_model_that_fits_nowhere() -> None:
    shape = TransformerShape(80, 8192, 64, 128000, 4096, stores_scores=False)
    evaluator = ShapeEvaluator(shape, find_cluster("h100x8"))
    limits = (
        "home.optimizer=device home.parameters=device home.activations=device recompute=layer schedule=1f1b context=1"
    )
    nothing = found(shape, "h100x8", 64, limits)
    assert nothing.best == ()
    assert isinstance(nothing.nearest, Candidate)
    missing = nothing.nearest.step.misses_by(nothing.memory)
    assert missing > 1e9
    assert nothing.enough > 8
    enough = found(shape, f"h100x{nothing.enough}", 64, limits)
    assert enough.best
    if nothing.enough > 16:
        assert not found(shape, f"h100x{nothing.enough - 8}", 64, limits).best
    assert evaluator.divides


@pytest.mark.parametrize("size", [8, 64, 96])
def test_the_smallest_cluster_is_the_same_from_any_size(size: int) -> None:
    """Of 112 devices 7 stages may fit; of 120, which have other divisors, none, and of 128 others."""

    class Sizes:
        homes = ()

        def __init__(self, count: int) -> None:
            self.fits = count >= 112 and count != 120

        def on(self, cluster: Cluster) -> Sizes:
            return Sizes(cluster.num_devices)

        def space(self, *_: object) -> Sizes:
            return self

        def outlines(self) -> list[tuple[int, Parallelism]]:
            return [(1, Parallelism())]

        def least(self, *_: object) -> float:
            return 0.0

        def rough(self, *_: object) -> list[SimpleNamespace]:
            return [SimpleNamespace(missing=0.0 if self.fits else 1.0)]

    evaluator: Any = Sizes(size)
    assert devices_enough(evaluator, find_cluster(f"h100x{size}"), (1,), Limits.parse(""), 1.0) == 112


def test_nothing_legal_is_an_error() -> None:
    with pytest.raises(PlanError, match=r"no plan of 8 ranks on h100x8 is legal .*within tensor=3"):
        found(GPT, "h100x8", 64, "tensor=3")


def test_an_odd_number_of_devices_leaves_some_idle() -> None:
    five = found(replace(GPT, layers=4), find_cluster("h100x5"), 64)
    assert five.best[0].plan.num_processes in (4, 5)


def test_batches() -> None:
    assert batch_sizes(512, 2048) == (512, 1024, 2048)
    assert batch_sizes(100, 250) == (100, 200, 250)
    assert batch_sizes(7, 7) == (7,)
    assert batch_sizes(1, 512) == (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
    assert batch_sizes(1, 1_000_000) == (1, 8, 64, 512, 4096, 32768, 262144, 1_000_000)


SMALL = """
[model]
name = "bytes_gpt"
layers = 2
width = 32
heads = 2
sequence = 16

[train]
steps = 2
batch_size = 8
out = "{out}"
"""


@pytest.fixture
def job(tmp_path: Path) -> Path:
    path = tmp_path / "job.toml"
    path.write_text(SMALL.format(out=tmp_path / "run"))
    return path


def test_the_command_for_a_job(job: Path) -> None:
    limits = "sync=1 home.optimizer=device home.parameters=device home.activations=device precision=fp32 micro=1"
    limits += " data=1..2 pipeline=1 context=1 recompute=none tensor=1"
    result = CliRunner().invoke(
        app, ["plan", str(job), "--cluster", "h100x2", "--batch", "4..8", "--limit-keys", limits]
    )
    assert result.exit_code == 0, result.output
    lines = result.output.strip().splitlines()
    assert lines[-1].startswith(f"plait train {job} --plan ")
    Plan.parse(lines[-1].split('"')[1])
    for text in (
        "the best plans",
        "faster and smaller",
        "well-known choices that lost",
        "$/M tokens",
        "simulated",
        "of batches of 4 and 8 rows",
    ):
        assert text in result.output


def test_the_command_for_a_shape(tmp_path: Path) -> None:
    shape = tmp_path / "shape.toml"
    text = (EXAMPLES / "shapes" / "llama3_70b.toml").read_text()
    shape.write_text(text.replace("layers = 80", "layers = 40"))
    homes = "home.optimizer=device home.parameters=device home.activations=device recompute=layer context=1"
    alone = CliRunner().invoke(app, ["plan", str(shape), "--cluster", "h100x4", "--limit-keys", homes])
    assert alone.exit_code == 1, alone.output
    assert "no plan fits" in alone.output
    assert "the nearest misses by" in alone.output
    assert "the smallest cluster of these devices that would do has" in alone.output
    shape.write_text(text.replace("layers = 80", "layers = 8"))
    options = ["--cluster", "h100x8", "--batch", "8..16", "--memory", "70GiB", "--limit-keys", homes]
    larger = CliRunner().invoke(app, ["plan", str(shape), *options])
    assert larger.exit_code == 0, larger.output
    assert "70.0 GiB each (as given)" in larger.output
    assert "batch" in larger.output
    assert larger.output.strip().splitlines()[-1].startswith(f"plait simulate {shape} --cluster h100x8 --plan ")


def test_a_model_of_ones_own() -> None:
    """A model with a part that tensor parallelism cannot split, and that has no layers to recompute."""
    model = torch.nn.Sequential(torch.nn.Linear(12, 48), torch.nn.Tanh(), torch.nn.Linear(48, 3))
    batch = {"x": torch.zeros(8, 12), "y": torch.zeros(8, dtype=torch.int64)}

    def loss(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(model(batch["x"]), batch["y"])

    best = plait.search(model, loss, batch, "xeon-2core", limits="sync=1 micro=1..2")
    assert best
    assert [each.score for each in best] == sorted((each.score for each in best), reverse=True)
    assert all(not each.plan.relaxed_axis for each in best)
    for each in best[:2]:
        again = plait.simulate(model, loss, batch, each.plan, "xeon-2core")
        assert again.seconds == each.step.seconds
        assert again.peak_memory == each.memory
        assert each.step.size == pytest.approx(each.memory, rel=1.0)
    with pytest.raises(PlanError, match="is nearest, and misses by"):
        plait.search(model, loss, batch, "xeon-2core", limits="sync=1", memory=100)


@pytest.mark.parametrize(("schedule", "microbatches"), [("1f1b", 1), ("gpipe", 4)])
def test_a_budget_leaves_room_for_what_the_schedule_keeps(schedule: str, microbatches: int) -> None:
    """`microbatches`, of all layers, are kept at once on the fullest rank."""
    node, mebi = find_cluster("h100x2"), 2**20
    evaluator = ModelEvaluator(torch.nn.Linear(1, 1), loss_fn, lambda _: {"x": torch.zeros(1)}, 16, node)
    kept = PrecisionForms(1.0, 2.0, {NONE: 64 * mebi, FULL: 8 * mebi})  # bytes of a row
    evaluator._forms = ModelForms(
        node, 4, 1e6, StateBytes(4, 4, 8), 0.0, 0.0, 1.0, {"fp32": kept}, None, None, None, None
    )  # fmt: skip
    how = Parallelism(pipeline=2, num_micro=8, recompute=FULL, schedule=schedule)
    room = 120 * mebi
    found = evaluator.refine(how, 16, sum(evaluator.forms.least_memory(how, 16)[0].values()) + room, Limits())
    assert 16 * mebi < found.budget <= room / microbatches


def test_experts_of_a_captured_model_are_searched() -> None:
    model, batch = memory_ranks.mixture(), memory_ranks.batch()
    limits = "sync=1 micro=1 expert=4 pipeline=1 tensor=1 context=1 recompute=none precision=fp32 zero=0..1"
    homes = "home.optimizer=device home.parameters=device home.activations=device"
    node = find_cluster("h100x4")
    evaluator = ModelEvaluator(model, loss_fn, lambda _: batch, memory_ranks.ROWS, node)
    best = search(evaluator, node, (memory_ranks.ROWS,), Limits.parse(f"{limits} {homes}")).best
    assert {Parallelism.of(each.plan).experts for each in best} == {4}
    known = evaluator.forms.experts
    assert known is not None
    assert known.number == 4
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    share = sum(size for name, size in sizes.items() if ".down." in name) / sum(sizes.values())
    assert known.parameters == pytest.approx(share, rel=0.02)
    rows = 2 * memory_ranks.SEQUENCE  # two experts have each token
    assert known.num_bytes == pytest.approx(8 * rows * 64 * 4, rel=0.02)  # four exchanges for each of two layers
    closed, held = evaluator.forms.own(Parallelism.of(best[0].plan)), best[0].step.estimate.memory["parameters"]
    assert 4 * closed.held == pytest.approx(held, rel=0.02)
    report = plait.verify(model, loss_fn, batch, best[0].plan)
    assert report.ok, report


@pytest.mark.parametrize(
    ("model", "loss", "batch", "message"),
    [
        (len, loss_fn, torch.ones(2, 4), "the model is a builtin_function_or_method, not a torch.nn.Module"),
        (torch.nn.Linear(4, 4), "mse", torch.ones(2, 4), "loss_fn is a str; give a function of"),
        (torch.nn.LazyLinear(4), loss_fn, torch.ones(2, 4), "has no shape yet"),
        (torch.nn.Linear(4, 4), loss_fn, torch.ones(0, 4), "the batch has no rows"),
        (torch.nn.Linear(4, 4), loss_fn, {}, "the batch holds no tensor"),
    ],
)
def test_what_no_plan_is_searched_for(model: Any, loss: Any, batch: Any, message: str) -> None:
    with pytest.raises(PlaitError, match=message):
        plait.search(model, loss, batch, "h100x2")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--memory", "70"], "--memory 70: a size has a number and a unit"),
        (["--batch", "8..2"], "--batch 8..2: it is a number of rows"),
        (["--batch", "1..100000000"], "--batch: a batch of 100000000 rows has more than the"),
        (["--limit-keys", "bucket=25"], "bad value '25' of the limit 'bucket=25': a size has a number and a unit"),
        (["--limit-keys", "data=3"], "is legal for a batch of 8 rows"),
        (["--cluster", "h10"], "there is no cluster 'h10'"),
    ],
)
def test_bad_options(options: list[str], message: str, job: Path) -> None:
    result = CliRunner().invoke(app, ["plan", str(job), *(["--cluster", "cpu"] if "--cluster" not in options else []),
                                      *options])  # fmt: skip
    assert result.exit_code == 2
    assert message in result.output


FEW = "sync=1 micro=1..8 tensor=1..2 pipeline=1..2 home.optimizer=device home.parameters=device"


@functools.cache
def to_loss(noise: float | None, rows: tuple[int, ...], limits: str = "") -> FoundPlans:
    where = find_cluster("h100x8")
    goal = Goal(True, None if noise is None else NoiseScale(noise), 1000, 64)
    return search(ShapeEvaluator(GPT, where), where, rows, Limits.parse(limits + " context=1"), goal=goal)


def test_little_noise_wants_small_batches_and_much_noise_large_ones() -> None:
    sizes = (8, 64, 512)
    best = {noise: to_loss(noise, sizes, FEW).best[0] for noise in (1.0, 1e6)}
    assert [best[noise].rows for noise in (1.0, 1e6)] == [8, 512]
    for noise, each in best.items():
        steps = 1000 * (1 + noise / each.rows) / (1 + noise / 64)
        assert each.seconds_to_loss == pytest.approx(steps * each.step.seconds)
        others = to_loss(noise, sizes, FEW).of_batches
        assert [other.rows for other in others] == [8, 64, 512]
        assert all(other.seconds_to_loss >= each.seconds_to_loss for other in others)
        found = to_loss(noise, sizes, FEW).best
        for one, after in pairwise(found):
            later = after.seconds_to_loss / one.seconds_to_loss - 1
            assert (one.why == f"comes to the loss {later:.1%} later") == (one.rows != after.rows)


def test_of_one_batch_the_order_is_that_of_steps() -> None:
    tokens = search(
        ShapeEvaluator(GPT, find_cluster("h100x8")), find_cluster("h100x8"), (64,), Limits.parse("context=1")
    )
    assert [each.plan for each in to_loss(None, (64,)).best] == [each.plan for each in tokens.best]
    assert [each.plan for each in to_loss(300.0, (64,)).best] == [each.plan for each in tokens.best]
    assert to_loss(None, (64,)).best[0].seconds_to_loss == pytest.approx(1000 * tokens.best[0].step.seconds)


def test_between_which_noise_scales_a_batch_is_best() -> None:
    found = to_loss(None, (8, 64, 512), FEW)
    for each in found.of_batches:
        low, high = best_between(each, found.of_batches)
        for noise in (low * 1.01 + 0.01, min(high, 1e9) * 0.99) if low < high else ():
            best = min(found.of_batches, key=lambda other: (1 + noise / other.rows) * other.step.seconds)
            assert best.rows == each.rows
    text = describe_plans(found, "run", "measure it")
    assert "unknown: which batch is best" in text
    assert "to measure it: measure it" in text
    assert "batch 8: below" in text and "batch 512: above" in text
    assert "to a loss  " not in text  # no time is told that is not known
    known = describe_plans(to_loss(300.0, (8, 64, 512), FEW), "run")
    assert "with a gradient noise scale of 300 rows (given)" in known and ", as it is" in known


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--goal", "speed"], "--goal speed: plans are ranked by tokens per second"),
        (["--noise-scale", "300"], "--noise-scale 300: tokens per second do not depend on it; add --goal loss"),
        (["--goal", "loss", "--noise-scale", "-3"], "--noise-scale -3: a number of rows is more than 0"),
        (
            ["--goal", "loss", "--noise-scale", "nowhere"],
            "--noise-scale nowhere: it is a number of rows, or the folder",
        ),
        (["--goal", "loss", "--noise-scale", "."], "'.' has no gradient noise scale that was measured"),
    ],
)
def test_bad_goals(options: list[str], message: str, job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(job.parent)
    result = CliRunner().invoke(app, ["plan", str(job), "--cluster", "cpu", *options])
    assert result.exit_code == 2
    assert message in result.output.replace("\n", " ")


def test_a_run_measures_what_a_plan_for_a_loss_is_chosen_by(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(job.parent)
    limits = (
        "sync=1 precision=fp32 micro=1 data=2 zero=0 pipeline=1 context=1 recompute=none tensor=1 home.optimizer=device"
    )
    plan = ["plan", str(job), "--cluster", "h100x2", "--limit-keys", limits, "--goal", "loss"]
    unknown = CliRunner().invoke(app, plan)
    assert unknown.exit_code == 0, unknown.output
    measure = f"plait train {job} --set train.noise_every=5, then add --noise-scale {job.parent / 'run'}"
    assert f"to measure it: {measure}" in unknown.output
    changes = ["--set", "train.noise_every=1", "--set", "train.steps=12", "--set", "sample.length=0"]
    trained = CliRunner().invoke(app, ["train", str(job), "--processes", "1", *changes])
    assert trained.exit_code == 0, trained.output
    lines = read_steps(job.parent / "run" / "metrics.jsonl")
    assert sum("noise_trace" in line for line in lines) == 12
    assert measured_noise(job.parent / "run").source == f"measured 6 times, at steps 7 to 12 of {job.parent / 'run'}"
    known = CliRunner().invoke(app, [*plan, "--batch", "8..16", "--noise-scale", str(job.parent / "run")])
    assert known.exit_code == 0, known.output
    assert "rows (measured 6 times, at steps 7 to 12" in known.output
    assert "the fastest batch to a loss depends on the gradient noise scale" in known.output
    page = CliRunner().invoke(app, ["report", str(job.parent / "run")])
    assert page.exit_code == 0, page.output
    html = (job.parent / "run" / "report.html").read_text()
    assert "<th>gradient noise scale</th>" in html and "rows (measured 6 times" in html
