"""plait simulate: shapes from files, steps of plans on clusters, and what is refused."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import memory_ranks
import pytest
import torch
from typer.testing import CliRunner

import plait
from plait.api.cli import app
from plait.api.job.gpt import BytesGPT, loss_fn
from plait.api.job.prediction_commands import simulate_config
from plait.compile.ops.experts import expert_mm
from plait.cost.transformer import TransformerShape
from plait.cost.transformer_memory import least_budget
from plait.cost.transformer_simulation import SimulatedStep, program_of, simulate_step
from plait.cost.transformer_step import estimate_step
from plait.errors import ConfigError, PlanError
from plait.plan.parallelism import FULL, Parallelism
from plait.plan.plan import Plan
from plait.plan.sharding_plan import ZERO_STAGES
from plait.report.step_prediction import describe_step, shown_seconds
from plait.spec.cluster import Cluster, DeviceSpec, LinkSpec
from plait.spec.cluster_file import find_cluster

EXAMPLES = Path(__file__).parent.parent / "examples"
SHAPE = TransformerShape(16, 1024, 16, 32000, 1024, tied=False, stores_scores=False)
# Links that take no time, so that only the schedule decides.
FREE = Cluster("free", 64, replace(find_cluster("h100").device), (LinkSpec("node", 0.0, 3e12),))


def step(plan: str, rows: int = 64, cluster: Cluster = FREE, shape: TransformerShape = SHAPE) -> SimulatedStep:
    return simulate_step(shape, Plan.parse(plan), rows, cluster)


def test_a_plan_as_numbers() -> None:
    plan = Plan.parse(
        "pipeline=2 replica=2 data=4 tensor=2 zero=2 micro=8 recompute=layer schedule=interleaved chunks=3"
    )
    assert Parallelism.of(plan) == Parallelism(
        batch=8, weights=2, pipeline=2, chunks=3, num_micro=8, cuts=ZERO_STAGES[2], sharded=4, recompute=FULL,
        schedule="interleaved",
    )  # fmt: skip
    assert Parallelism.of(plan).num_ranks == plan.num_processes
    assert Parallelism.of(Plan.parse("data=2 context=4")) == Parallelism(batch=2, context=4)
    assert Parallelism.of(Plan()) == Parallelism()


def test_more_ranks_share_the_work() -> None:
    one, eight = step(""), step("data=8")
    assert one.estimate.compute / eight.estimate.compute == pytest.approx(8, rel=0.15)  # smaller products reach less
    assert step("tensor=8").estimate.compute < one.estimate.compute / 5
    assert eight.mfu == pytest.approx(one.mfu, rel=0.15)
    assert 0.1 < one.mfu < 0.7


def test_schedules_of_a_pipeline_are_simulated() -> None:
    """With equal stages 1f1b has the bubble of the closed form, and interleaving a smaller one."""
    small_head = replace(SHAPE, vocab=2)
    plain = step("pipeline=4 micro=8", shape=small_head)
    closed = estimate_step(small_head, Parallelism.of(plain.plan), 64, FREE, program_of(plain.plan))
    assert plain.seconds == pytest.approx(closed.seconds, rel=0.01)
    assert plain.estimate.bubble / plain.seconds == pytest.approx(3 / 11, rel=0.03)
    bubbles = [
        step(f"pipeline=4 micro=8 {more}", shape=small_head).estimate.bubble
        for more in ("schedule=gpipe", "schedule=interleaved chunks=4", "schedule=zb-h1")
    ]
    assert bubbles[0] == pytest.approx(plain.estimate.bubble, rel=0.01)
    assert bubbles[1] < plain.estimate.bubble / 2
    assert bubbles[2] < plain.estimate.bubble * 0.75


def test_zero_and_recomputation_take_less_memory() -> None:
    peaks = [
        step(f"data=8 micro=8 {more}").estimate.peak_memory
        for more in ("", "zero=1", "zero=3", "zero=3 recompute=layer")
    ]
    assert peaks == sorted(peaks, reverse=True)
    plain, cut = step("data=8").estimate.memory, step("data=8 zero=3").estimate.memory
    for kind in ("parameters", "gradients", "optimizer"):
        assert cut[kind] == plain[kind] / 8
    assert step("data=8 zero=3").estimate.sent["node"] == pytest.approx(1.5 * step("data=8").estimate.sent["node"])


def test_precision_halves_activations() -> None:
    plans = ("data=8", "data=8 precision=bf16", "data=8 precision=bf16-params")
    wide, autocast, narrow = (step(plan).estimate.memory for plan in plans)
    assert wide["activations"] == 2 * narrow["activations"]
    assert narrow["activations"] < autocast["activations"] < wide["activations"]  # the residual stream is in float32
    assert narrow["parameters"] == wide["parameters"] * 1.5  # with copies in half precision
    narrow_sums = step("data=8 precision=bf16-params reduce=bf16").estimate.sent["node"]
    assert narrow_sums == step("data=8 precision=bf16-params").estimate.sent["node"] / 2
    assert step("precision=bf16").seconds < step("").seconds / 4


def test_a_pipeline_over_a_slow_line_waits_for_it() -> None:
    far = find_cluster("two-sites")
    found = step("pipeline=4 data=4 micro=16", cluster=far)  # only the second of three hops is between the sites
    message = 4 * SHAPE.sequence * SHAPE.hidden / (125e6 * 0.9 / 8)
    assert found.seconds > 16 * message
    assert found.seconds > 20 * step("pipeline=4 data=4 micro=16", cluster=find_cluster("h100x16")).seconds


def test_slow_lines_between_sites_are_seen() -> None:
    near, far = (step("data=16", cluster=find_cluster(name)) for name in ("h100x16", "two-sites"))
    assert far.estimate.data > 100 * near.estimate.data
    assert far.estimate.sent.keys() == {"site"}


@pytest.mark.parametrize(
    ("plan", "rows", "message"),
    [
        ("data=8 micro=2", 24, "24 rows are not whole microbatches: 8 ranks with 2 microbatches each"),
        (
            "tensor=32 data=4",
            64,
            "has 128 ranks, and the cluster free 64 devices; name a larger cluster, as in --cluster h100x128",
        ),
        ("tensor=3", 63, "16 heads do not divide over 3 ranks"),
        ("pipeline=32 micro=2", 64, "16 layers are fewer than 32 ranks"),
        (
            "data=2 sync=8 compress=powersgd:2",
            64,
            "what it sends depends on the shapes of tensors; write compress=none",
        ),
        ("home.optimizer=host", 64, "nothing is known of its hosts; leave home"),
        ("data=2 central=host", 64, "closed forms have no parameters that ranks share; write zero=2"),
        ("pipeline=2 micro=4 schedule=pipedream", 64, "it has no end of a step"),
        ("recompute=budget=1GiB", 64, "the inputs of layers and the loss of a microbatch take 28096MiB; give at least"),
        ("recompute=gathers data=2 zero=3", 64, "depends on the model's ops"),
        ("stages=[tensor=2|data=2]", 64, "has stages that differ"),
    ],
)
def test_what_is_not_simulated(plan: str, rows: int, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        step(plan, rows)


def test_values_off_the_device_cost_copies_that_compute_does_not_hide() -> None:
    node = find_cluster("v100")
    large = TransformerShape(40, 5120, 40, 50257, 2048, stores_scores=False)
    plain, host, disk, all_away = (
        step(f"micro=16 precision=fp16-params recompute=layer {homes}", 16, node, large)
        for homes in (
            "",
            "home.optimizer=host",
            "home.optimizer=disk",
            "home.parameters=host home.activations=host home.optimizer=host",
        )
    )
    assert not plain.fits
    assert host.estimate.peak_memory < plain.estimate.peak_memory / 2
    assert host.estimate.optimizer > 5 * plain.estimate.optimizer  # the host's memory is slower than the device's
    assert disk.seconds > host.seconds
    states = sum(plain.estimate.memory[kind] for kind in ("parameters", "gradients", "optimizer"))
    assert sum(all_away.estimate.host_memory.values()) == pytest.approx(
        states + plain.estimate.memory["activations"], rel=0.05
    )
    assert all_away.fits
    few = "micro=4 precision=fp16-params recompute=layer home.parameters=host home.optimizer=host"
    assert step(few, 16, node, large).estimate.copies == 0.0  # behind what four rows compute
    little = step("home.parameters=host home.optimizer=host precision=fp16-params", 1, node, large).estimate
    assert little.copies > 0.3 * little.compute


def test_replicas_that_agree_later_exchange_seldom() -> None:
    far = find_cluster("two-sites")
    every, seldom, fewer_bits = (
        step(f"replica=2 data=8 zero=1 {more}", cluster=far).estimate
        for more in ("", "sync=64 outer=nesterov", "sync=64 outer=nesterov compress=int8")
    )
    own = every.memory["parameters"] / 4 / 8  # of which a rank of the eight trains a part
    assert seldom.sent["site"] == pytest.approx(4 * own / 64)  # a float32 sum of two, of which each sends half twice
    assert seldom.data + seldom.exchanges < every.data / 20
    assert fewer_bits.exchanges == pytest.approx(seldom.exchanges * (1 + 4 / 256) / 4, rel=0.03)
    assert seldom.memory["optimizer"] == every.memory["optimizer"] * 2  # the agreed weights, and a momentum
    hidden = step("replica=2 data=8 zero=1 sync=64 outer=nesterov overlap=4", cluster=far).estimate
    assert hidden.exchanges < seldom.exchanges


def test_experts_share_weights_and_send_rows() -> None:
    """Mixtral 8x7B: 46.7 billion parameters, 12.9 of which a token is multiplied with."""
    shape = TransformerShape(
        32, 4096, 32, 32000, 4096, 14336, 8, gated=True, biases=False, tied=False, learned_positions=False,
        dropout=False, stores_scores=False, num_experts=8, experts_per_token=2,
    )  # fmt: skip
    assert shape.parameters == pytest.approx(46.7e9, rel=0.002)
    active = shape.layers * shape.layer_weights + shape.embedding_parameters
    assert active == pytest.approx(12.9e9, rel=0.002)
    node = find_cluster("h100x8")
    alone, spread, room = (
        step(f"data=8 {more} precision=bf16-params", 64, node, shape).estimate
        for more in ("", "expert=8", "expert=8 expert.capacity=8")
    )
    experts = shape.layers * shape.expert_parameters
    assert alone.memory["optimizer"] - spread.memory["optimizer"] == pytest.approx(8 * experts * 7 / 8, rel=1e-6)
    assert room.weights == pytest.approx(8 * spread.weights, rel=0.05)  # room for all rows at each of 8 ranks
    assert alone.weights == 0.0
    assert spread.data < alone.data  # no other rank has the same experts
    cut = [step(f"data=8 {more} zero=1", 64, node, shape).estimate.memory["optimizer"] for more in ("", "expert=4")]
    assert cut[0] == pytest.approx(cut[1])


class Routed(memory_ranks.Experts):
    """Two experts for each token, whose results a router weighs."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.gate = torch.nn.Linear(width, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = self.gate(x).softmax(-1).topk(2, -1).values.reshape(-1, 1)
        rows = x.flatten(0, 1).unsqueeze(1).expand(-1, 2, -1).reshape(-1, x.shape[-1])
        ids = torch.arange(len(rows), device=x.device) % 4
        y = expert_mm(torch.nn.functional.gelu(expert_mm(rows, self.up, ids)), self.down, ids) * weights
        return y.view(*x.shape[:2], 2, -1).sum(2)


@pytest.mark.parametrize(
    ("experts", "plan"),
    [
        (4, "tensor=2"),
        (4, "data=2 zero=1 micro=2"),
        (4, "data=2 expert=2 tensor=2 recompute=layer"),
        (4, "tensor=2 sequence=yes recompute=layer"),
        (4, "data=2 expert=2 tensor=2 sequence=yes"),
        (4, "data=2 expert=2 tensor=2 sequence=yes recompute=layer"),
        (4, "data=4 expert=2"),
        (4, "data=2 expert=2 context=2 recompute=layer"),
        (1, "context=2"),
        (1, "context=2 recompute=layer"),
        (1, "context=2 context.kind=ring recompute=layer"),
        (1, "context=2 context.kind=gather recompute=layer"),
        (1, "context=2 context.kind=gather"),
    ],
)
def test_a_layer_sends_and_keeps_what_ranks_do(experts: int, plan: str) -> None:
    """What a further layer sends and keeps, by the graphs that ranks run, and by closed forms."""
    run, closed, walked, kept = [], [], [], []
    shape = TransformerShape(1, 64, 4, 256, 32, tied=False, dropout=False, stores_scores=False, num_experts=experts,
                             experts_per_token=min(experts, 2))  # fmt: skip
    for layers in (1, 2):
        model, batch = BytesGPT(layers=layers, width=64, heads=4, sequence=32), memory_ranks.batch()
        for block in model.blocks if experts > 1 else ():
            block.up, block.down = torch.nn.Identity(), Routed(64)
        found = plait.simulate(model, loss_fn, batch, plan, "h100x8")
        assert found.memory is not None
        walked.append(found.memory.fullest.saved)
        run.append(found.sent["node"])
        estimate = step(plan, 16, find_cluster("h100x8"), replace(shape, layers=layers)).estimate
        closed.append(estimate.sent["node"])
        kept.append(estimate.memory["activations"])
    assert closed[1] - closed[0] == pytest.approx(run[1] - run[0], rel=0.02)  # but for biases and the router
    assert kept[1] - kept[0] == pytest.approx(walked[1] - walked[0], rel=0.05 if "recompute" in plan else 0.2, abs=17e3)


@pytest.mark.parametrize(
    ("experts", "plan"),
    [
        (1, "tensor=2 sequence=yes"),
        (1, "context=2"),
        (1, "context=2 context.kind=ring"),
        (1, "context=2 context.kind=gather"),
        (4, "data=2 expert=2 tensor=2"),
        (4, "data=2 expert=2 expert.capacity=2"),
    ],
)
def test_a_budget_is_no_smaller_than_what_ranks_must_keep(experts: int, plan: str) -> None:
    """By the error of ranks for a budget that is too small, and by the closed form's."""
    shape = TransformerShape(1, 64, 4, 256, 32, tied=False, dropout=False, stores_scores=False, num_experts=experts,
                             experts_per_token=min(experts, 2))  # fmt: skip
    said, closed = [], []
    for layers in (1, 2):
        model, batch = BytesGPT(layers=layers, width=64, heads=4, sequence=32), memory_ranks.batch()
        for block in model.blocks if experts > 1 else ():
            block.up, block.down = torch.nn.Identity(), Routed(64)
        with pytest.raises(PlanError, match="KiB of activations stay") as caught:
            plait.memory(model, loss_fn, batch, f"{plan} recompute=budget=1KiB")
        said.append(int(re.findall(r"(\d+)KiB of activations stay", str(caught.value))[0]) * 1024)
        made = Plan.parse(f"{plan} recompute=budget=1KiB")
        how = Parallelism.of(made)
        rows = 16 / how.batch / how.context
        closed.append(least_budget(replace(shape, layers=layers), how, rows, program_of(made)))
    assert closed[1] - closed[0] == pytest.approx(said[1] - said[0], rel=0.1)


@pytest.mark.parametrize(
    "room", ["expert.capacity=1", "expert.capacity=2", "compile=inductor", "home.activations=host"]
)
def test_room_for_rows_of_experts_takes_memory(room: str) -> None:
    """By `plait.memory`, which walks through the graphs that ranks run; all four have room for each rank's rows."""
    shape = TransformerShape(2, 64, 4, 256, 32, tied=False, dropout=False, stores_scores=False, num_experts=4,
                             experts_per_token=2)  # fmt: skip
    given = room if "capacity" in room else "expert.capacity=2"  # the others have room for all rows of both ranks
    walked = plait.memory(memory_ranks.mixture(), loss_fn, memory_ranks.batch(), f"data=2 expert=2 {given}").fullest
    closed = step(f"data=2 expert=2 {room}", 16, find_cluster("h100"), shape).estimate
    kept = (closed.host_memory or closed.memory)["activations"]
    assert kept + closed.memory["logits"] == pytest.approx(walked.saved, rel=0.2)


def test_heads_may_be_wider_and_experts_shared() -> None:
    """Sizes that models' own cards say: of Qwen3 and PaLM all weights, of Qwen1.5-MoE those of a token too."""
    plain = {"biases": False, "learned_positions": False, "dropout": False, "stores_scores": False, "gated": True}
    qwen = TransformerShape(36, 4096, 32, 151936, 4096, 12288, 8, tied=False, **plain)
    assert qwen.parameters == pytest.approx(8.19e9, rel=0.001)
    assert replace(qwen, head_dim=128).parameters == qwen.parameters
    small = TransformerShape(28, 1024, 16, 151936, 4096, 3072, 8, head_dim=128, **plain)
    assert small.parameters == pytest.approx(596e6, rel=0.001)  # Qwen3-0.6B: 16 heads of 128 for a width of 1024
    palm = TransformerShape(118, 18432, 48, 256000, 2048, 73728, 1, head_dim=256, **plain)
    assert palm.parameters == pytest.approx(540.35e9, rel=0.001)
    mixture = TransformerShape(24, 2048, 16, 151936, 2048, 1408, tied=False, num_experts=60, experts_per_token=4,
                               shared_ffn=5632, **plain)  # fmt: skip
    assert mixture.parameters == pytest.approx(14.3e9, rel=0.005)
    active = mixture.layers * mixture.layer_weights + mixture.embedding_parameters
    assert active == pytest.approx(2.7e9, rel=0.01)
    wide, narrow = (step("data=8 tensor=2", shape=replace(small, head_dim=each)).estimate for each in (128, 64))
    assert wide.compute > narrow.compute
    assert wide.memory["activations"] > narrow.memory["activations"]


def test_a_budget_lies_between_layers_and_nothing() -> None:
    nothing, layer = step("micro=8"), step("micro=8 recompute=layer")
    saved = nothing.estimate.memory["activations"] + nothing.estimate.memory["logits"]
    budgets = [step(f"micro=8 recompute=budget={int(saved * part) // 2**20}MiB") for part in (0.4, 0.6, 0.8)]
    times = [each.seconds for each in (layer, *budgets, nothing)]
    assert times == sorted(times, reverse=True)
    assert budgets[0].estimate.peak_memory < budgets[2].estimate.peak_memory < nothing.estimate.peak_memory
    assert budgets[2].estimate.model_flops == nothing.estimate.model_flops


@pytest.mark.parametrize(
    "schedule", ["gpipe", "1f1b", "interleaved chunks=2", "zb-h1", "zb-h2", "zb-v", "dualpipe-v", "looped-bfs chunks=2"]
)
def test_a_long_schedule_repeats_what_its_first_rounds_do(schedule: str) -> None:
    plan = Plan.parse(f"pipeline=4 micro=64 schedule={schedule}")
    whole, short = (simulate_step(SHAPE, plan, 64, FREE, most_actions=most) for most in (0, 100))
    assert short.trace is not None
    assert whole.trace is not None
    assert short.trace.seconds < whole.trace.seconds / 2
    assert short.seconds == pytest.approx(whole.seconds, rel=0.002)
    assert short.estimate.memory["activations"] == pytest.approx(whole.estimate.memory["activations"], rel=0.02)


def test_a_schedule_that_is_too_long_is_simulated_in_part_or_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(WHOLE.replace("layers = 2", "layers = 4000") + "[train]\nbatch_size = 800000\n")
    found = simulate_config(tmp_path / "mine.toml", Plan.parse("pipeline=4 micro=800000"), "h100")
    assert isinstance(found, SimulatedStep)
    assert found.num_simulated == 12
    assert "4 stages, 800000 microbatches, of the first 12: utilisation" in describe_step(found)
    with pytest.raises(PlanError, match=r"actions of its schedule would be simulated; take fewer stages or microbatc"):
        step("pipeline=4000 micro=4000", 4000, find_cluster("h100x4000"), replace(SHAPE, layers=4000))
    with pytest.raises(PlanError, match="4000 layers are fewer than 4 ranks x 100000000 chunks"):
        step("pipeline=4 micro=4 schedule=interleaved chunks=100000000", 4, shape=replace(SHAPE, layers=4000))


def test_stages_have_the_layers_that_even_out_their_time() -> None:
    found = step("pipeline=4 micro=8", shape=replace(SHAPE, layers=18, vocab=256000))
    assert sum(found.layers) == 18
    assert found.layers[-1] < min(found.layers[:-1])  # the output layer is as long as several
    even = step("pipeline=4 micro=8", shape=replace(SHAPE, layers=18, vocab=256))
    assert max(even.layers) - min(even.layers) == 1


def test_memory_is_what_plait_predicts_op_by_op() -> None:
    """The closed form of a GPT against `plait.memory`, which walks through the graphs that ranks run, and knows that
    not all gradients are there when activations are."""
    batch = {"x": torch.zeros(4, 64, dtype=torch.int64), "y": torch.zeros(4, 64, dtype=torch.int64)}
    model = BytesGPT(layers=4, width=64, heads=4, sequence=64)
    walked = plait.memory(model, loss_fn, batch, "precision=bf16").fullest
    shape = TransformerShape(4, 64, 4, 256, 64, tied=False, dropout=False, stores_scores=False)
    closed = step("precision=bf16", 4, shape=shape).estimate
    assert closed.memory["activations"] + closed.memory["logits"] == pytest.approx(walked.saved, rel=0.2)
    assert walked.peak <= closed.peak_memory <= 1.25 * walked.peak


@pytest.mark.parametrize(("axes", "values"), [("", 1), ("tensor=2", 2), ("tensor=2 sequence=yes", 1)])
def test_a_layer_that_is_recomputed_keeps_its_input_and_the_sum_after_attention(axes: str, values: int) -> None:
    """By `plait.memory`, which walks through the graphs that ranks run, and by closed forms."""
    batch = {"x": torch.zeros(4, 64, dtype=torch.int64), "y": torch.zeros(4, 64, dtype=torch.int64)}
    plan, value = f"{axes} recompute=layer", 4 * 64 * 64 * 4
    models = [BytesGPT(layers=num, width=64, heads=4, sequence=64) for num in (2, 4)]
    few, many = (plait.memory(model, loss_fn, batch, plan).fullest.saved for model in models)
    assert many - few == 2 * values * value
    shape = TransformerShape(2, 64, 4, 256, 64, tied=False, dropout=False, stores_scores=False)
    shapes = [shape, replace(shape, layers=4)]
    few, many = (step(plan, 4, shape=each).estimate.memory["activations"] for each in shapes)
    assert many - few == 2 * values * value


def test_a_layer_that_is_recomputed_sends_no_sum_again() -> None:
    plain, again = (step(f"tensor=2 {more}").estimate.sent for more in ("", "recompute=layer"))
    assert again == plain
    gathers = step("tensor=2 sequence=yes recompute=layer").estimate.sent
    assert gathers["node"] == pytest.approx(plain["node"] * 5 / 4)
    assert step("data=8 zero=3 recompute=layer").estimate.sent == step("data=8 zero=3").estimate.sent


def test_a_step_without_a_pipeline_has_a_trace_and_says_where_buckets_are_small() -> None:
    """Sums of 25 MiB over 1,024 ranks are mostly latency."""
    many, few = (step(f"data={n} zero=1 precision=bf16-params", n, find_cluster(f"h100x{n}")) for n in (1024, 8))
    assert many.trace.seconds == pytest.approx(many.seconds)
    assert {span.kind for span in many.trace.spans} == {"forward", "backward", "reduce", "optimizer"}
    assert "bucket=" not in describe_step(few)
    ((size, saved),) = re.findall(r"bucket=(\w+) would save (.*) of", describe_step(many))
    larger = step(f"data=1024 zero=1 precision=bf16-params bucket={size}", 1024, find_cluster("h100x1024"))
    assert saved == shown_seconds(many.seconds - larger.seconds)
    assert larger.seconds < 0.5 * many.seconds


def test_what_is_off_the_device_is_shown() -> None:
    shown = describe_step(step("data=8 zero=1 home.optimizer=host", 64, find_cluster("h100x8")))
    assert "copies to the host" in shown and "memory of a rank outside the device" in shown


def test_a_shape_by_itself_on_the_command_line(tmp_path: Path) -> None:
    file = str(EXAMPLES / "shapes" / "llama3_70b.toml")
    plan = "data=2 tensor=8 pipeline=4 micro=32 precision=bf16-params zero=1 recompute=layer"
    result = CliRunner().invoke(app, ["simulate", file, "--plan", plan, "--cluster", "h100x64"])
    assert result.exit_code == 0, result.output
    for text in ("64 of h100x64", "MFU", "tokens/s/rank", "1f1b on 4 ranks, 4 stages, 32 microbatches", "fits", "pod"):
        assert text in result.output
    alone = CliRunner().invoke(app, ["simulate", file, "--plan", "", "--cluster", "h100"])
    assert "does not fit, by" in alone.output
    page = tmp_path / "page.html"
    CliRunner().invoke(app, ["simulate", file, "--plan", plan, "--cluster", "h100x64", "--html", str(page)])
    assert "pipeline=4" in page.read_text()
    drawn = CliRunner().invoke(app, ["simulate", file, "--plan", "", "--cluster", "h100", "--html", str(page)])
    assert drawn.exit_code == 0 and "one device" in page.read_text()


WHOLE = "[shape]\nlayers = 2\nhidden = 8\nheads = 2\nvocab = 9\nsequence = 4\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[shape]\nlayers = 2\n", "shape.hidden is missing; hidden, heads, vocab, sequence is needed"),
        ("[shape]\nlayer = 2\n", "unknown key shape.layer; did you mean layers"),
        ("[shape]\nlayers = 2.5\n", "shape.layers = 2.5; it should be a whole number"),
        (WHOLE + "kv_heads = -2\n", "kv_heads = -2; it is 1 or more, or left out"),
        (WHOLE.replace("layers = 2", "layers = 1" + 400 * "0"), "layers of more than 10000; give 10000 at most"),
        (WHOLE.replace("= 9", "= 1" + 5000 * "0"), "is not valid TOML: a number has more than 4300 digits"),
        ("x = " + 5000 * "[" + 5000 * "]", "is not valid TOML: its tables or arrays are nested too deep"),
        (WHOLE + "[train]\nbatch_size = 10000000000\n", "train.batch_size = 10000000000; it should be .* from 1 to"),
        (WHOLE + "ffn = -64\n", "ffn = -64; it is 1 or more, or left out"),
        (WHOLE + "[train]\nbatch_size = 0\n", "train.batch_size = 0; it should be the sequences of a step, from 1"),
        (WHOLE + "[trian]\nbatch_size = 4\n", "unknown key trian; a file with a .shape. has that and train.batch_size"),
        ("", "has no tables"),
        ("[shape]\ngated = 1\n", "shape.gated = 1; it should be true or false"),
        ("shape = 1\n", "shape = 1; it should be a table"),
    ],
)
def test_bad_files(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "mine.toml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        simulate_config(tmp_path / "mine.toml", Plan(), "h100")


@pytest.mark.parametrize(
    ("axes", "fits"), [("context=8 tensor=8 sequence=yes", True), ("context=64", False), ("context=64 zero=3", True)]
)
def test_a_million_tokens_on_64_gpus(axes: str, fits: bool) -> None:
    file = EXAMPLES / "shapes" / "llama3_8b_1m.toml"
    arguments = ["simulate", str(file), "--plan", f"{axes} recompute=layer precision=bf16-params"]
    found = CliRunner().invoke(app, [*arguments, "--cluster", "h100x64"]).output
    assert "1048576 tokens a step" in found and (": fits" in found) is fits


def test_a_shape_needs_a_batch(tmp_path: Path) -> None:
    text = "[shape]\nlayers = 2\nhidden = 8\nheads = 2\nvocab = 10\nsequence = 4\n"
    (tmp_path / "mine.toml").write_text(text)
    with pytest.raises(ConfigError, match="train.batch_size is missing; it is the sequences of a step"):
        simulate_config(tmp_path / "mine.toml", Plan(), "h100")
    (tmp_path / "mine.toml").write_text(text + "[train]\nbatch_size = 2\nsteps = 3\n")
    with pytest.raises(ConfigError, match=r"unknown key train.steps"):
        simulate_config(tmp_path / "mine.toml", Plan(), "h100")


def test_a_price_is_given_where_it_is_known() -> None:
    assert step("data=8", cluster=find_cluster("h100")).dollars_per_million_tokens is not None
    unknown = Cluster("c", 1, DeviceSpec("d", (("float32", 1e13),), 1e10, 1e12), (LinkSpec("node", 0, 1e9),))
    assert step("", cluster=unknown).dollars_per_million_tokens is None
