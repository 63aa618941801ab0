"""Steps of lowered programs, simulated: small programs by hand, and a GPT under several plans."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import plait
from plait.api.cli import app
from plait.api.deep_models import DEEP, Layers, equal_layers, layers_of_stages, with_fewer
from plait.api.job.gpt import BytesGPT, loss_fn
from plait.api.simulate_step import Simulator
from plait.backends.eager.passes import eager_graphs
from plait.compile.step_collectives import step_collectives
from plait.cost.collective_time import CollectiveKind, collective_time
from plait.cost.op_time import CallTimes, op_time
from plait.cost.repeated_layers import with_layers
from plait.cost.step_program import AxisCollective, CollectiveCall, CopyCall, OpCall, PipelineCalls, StepProgram
from plait.cost.step_simulation import StepSimulator
from plait.errors import ConfigError, PlanError
from plait.plan.plan import Plan
from plait.report.step_prediction import StepPrediction
from plait.schedule.families import make_schedule
from plait.schedule.readiness import chain, start_times, topological_order
from plait.schedule.shared_cores import shared_times
from plait.schedule.transfers import add_transfers
from plait.spec.cluster import CallTime, Cluster, DeviceSpec, HostSpec, LinkSpec
from plait.spec.cluster_file import find_cluster, parse_cluster
from plait.spec.mesh import Mesh
from plait.spec.schedule import SEND

pytestmark = pytest.mark.xdist_group("step simulation")  # plans share what is captured

# A product of 1e9 flops takes a second, as does an op of 1e9 bytes, and as do 1e9 bytes over the link.
DEVICE = DeviceSpec("slow", (("float32", 1e9),), 1e12, 1e9)
LINK = LinkSpec("node", 0.0, 1e9)
CLUSTER = Cluster("slow", 8, DEVICE, (LINK,), host=HostSpec("cpu", 8, 1e12, 1e9, 1e12, 4e9, 2e9, 1, 1e9))
GRADIENTS = AxisCollective(CollectiveKind.ALL_REDUCE, "data", 10**9)  # of two ranks: twice half of it, a second


def product(phase: str, seconds: float) -> OpCall:
    return OpCall("mm()", phase, flops=seconds * 1e9)


def sized(signature: str, num_bytes: float) -> OpCall:
    return OpCall(signature, "forward", num_bytes=num_bytes)


def program(*calls: object, size: int = 2, **more: object) -> StepProgram:
    return StepProgram(Mesh((("data", size),)), {"alone": calls}, ("alone",), ((),), **more)  # type: ignore[arg-type]


START = CollectiveCall("start()", "backward", (GRADIENTS,), "start", stream="data")
WAIT = CollectiveCall("wait()", "backward", (GRADIENTS,), "wait", begun=1, stream="data")
OVERLAPPED = program(product("forward", 1), START, product("backward", 0.75), WAIT, product("backward", 0.5))


def test_a_collective_runs_beside_what_follows_until_it_is_waited_for() -> None:
    found = StepSimulator(CLUSTER).simulate(OVERLAPPED)
    assert found.seconds == pytest.approx(1 + 1 + 0.5)
    assert found.times == pytest.approx({"compute": 2.25, "collectives": 0.25, "update": 0, "host": 0})
    rows = [(span.kind, span.start, span.end) for span in sorted(found.trace.spans, key=lambda span: span.start)]
    assert rows == [
        ("forward", 0, 1), ("send", 1, 2), ("backward", 1, 1.75), ("reduce", 1.75, 2), ("backward", 2, 2.5),
    ]  # fmt: skip
    assert found.trace.busy(0) == 2.25
    assert found.sent == {"node": 1e9}


def test_ranks_that_copy_themselves_wait_all_of_it() -> None:
    shared = replace(CLUSTER, links=(replace(LINK, overlaps=False),))
    assert StepSimulator(shared).simulate(OVERLAPPED).seconds == pytest.approx(2.25 + 1)


def test_what_computes_beside_a_transfer_is_slower_where_that_was_measured() -> None:
    slowed = replace(CLUSTER, device=replace(DEVICE, beside_transfers=0.5))
    # In the second of the transfer half a second of the backward's 0.75 is done.
    assert StepSimulator(slowed).simulate(OVERLAPPED).seconds == pytest.approx(1 + 1.25 + 0.5)


def test_collectives_of_one_communicator_run_one_after_the_other() -> None:
    again = replace(WAIT, begun=1)
    one_lane = program(START, replace(START), replace(WAIT, begun=0), again)
    assert StepSimulator(CLUSTER).simulate(one_lane).seconds == pytest.approx(2)
    two = program(START, replace(START, stream="other"), replace(WAIT, begun=0), again)
    assert StepSimulator(CLUSTER).simulate(two).seconds == pytest.approx(1)


def test_copies_to_the_host_have_a_stream_and_its_bandwidth() -> None:
    begin = CopyCall("fetch()", "forward", 10**9, "start")
    arrive = CopyCall("arrive()", "forward", 10**9, "wait", begun=0)
    host = program(begin, product("forward", 0.125), arrive)
    assert StepSimulator(CLUSTER).simulate(host).seconds == pytest.approx(0.5)
    disk = program(replace(begin, home="disk"), product("forward", 0.125), arrive)  # which 8 ranks share
    assert StepSimulator(CLUSTER).simulate(disk).seconds == pytest.approx(2)
    with pytest.raises(PlanError, match="nothing is known of the hosts of the cluster slow"):
        StepSimulator(replace(CLUSTER, host=None)).simulate(host)


def test_a_step_reads_its_batch_and_ends_with_what_the_host_does() -> None:
    device = replace(DEVICE, step_seconds=0.25)
    found = StepSimulator(replace(CLUSTER, device=device)).simulate(program(product("forward", 1), batch_bytes=10**9))
    assert found.seconds == pytest.approx(0.5 + 1 + 0.25)


def piped(num_micro: int = 4, num_ranks: int = 2, message: int = 0) -> StepProgram:
    edges = chain(num_ranks)
    schedule = add_transfers(make_schedule("1f1b", num_ranks, num_micro), edges)
    sends = {(r, a): message for r, actions in enumerate(schedule.ranks) for a in actions if a.kind == SEND}
    graphs = {f"{kind}{stage}": (product({"F": "forward"}.get(kind, "backward"), 1 + (kind == "B")),)
              for kind in "FB" for stage in range(num_ranks)}  # fmt: skip
    micro_graphs = {
        (stage, (kind, stage)): (f"{kind}{stage}",) * num_micro for kind in "FB" for stage in range(num_ranks)
    }
    mesh = Mesh((("pipeline", num_ranks), ("data", 1)))
    calls = PipelineCalls("pipeline", schedule, edges, micro_graphs, sends)
    updates = tuple((OpCall("update()", "update", num_bytes=5e8),) for _ in range(num_ranks))
    return StepProgram(mesh, graphs, (), updates, calls)


def test_a_pipeline_has_the_bubble_of_its_schedule() -> None:
    found = StepSimulator(CLUSTER).simulate(piped())
    assert found.seconds == pytest.approx(3 * (4 + 1) + 0.5)  # microbatches, a bubble of one, the update
    assert found.trace.utilisation() == pytest.approx(12 / 15.5)
    assert found.times["bubble"] == pytest.approx(3)
    assert found.trace.peak_in_flight(0) == 2
    with_messages = StepSimulator(CLUSTER).simulate(piped(message=10**9 // 4))
    assert with_messages.seconds > found.seconds
    assert with_messages.sent == {"node": 10**9}


def test_ranks_that_share_cores_are_faster_while_others_wait() -> None:
    """With two ranks on one core a pipeline has no bubble."""
    alone = replace(CLUSTER, device=replace(DEVICE, together=((1, 2.0), (2, 1.0))))
    assert StepSimulator(alone).simulate(piped()).seconds == pytest.approx(12 + 0.5)
    assert [alone.device.speed(num) for num in (1, 1.5, 2, 3)] == [2, 1.5, 1, 1]
    schedule = piped(5, 4).pipeline
    assert schedule is not None
    found = topological_order(schedule.schedule, schedule.edges)
    given = (schedule.schedule, found, lambda rank, action: 1.0 + rank * action.computes, lambda *_: 0.25)
    assert shared_times(*given, lambda num: 1.0) == pytest.approx(start_times(4, *given[1:]))


def test_calls_take_what_was_measured_or_as_much_more_than_the_roofline_as_the_nearest() -> None:
    known = CallTime("aten.gelu(float32[1000])", 3e-6, 0.0, 8000.0)
    measured = replace(CLUSTER, calls=(known,), device=replace(DEVICE, view_seconds=1e-6))
    times = CallTimes(measured)
    assert times.seconds(sized("aten.gelu(float32[1000])", 8000)) == 3e-6
    ratio = 3e-6 / op_time(DEVICE, 0, 8000, "float32")
    assert times.seconds(sized("aten.gelu(float32[4000])", 32000)) == pytest.approx(ratio * 32e-6)
    assert times.seconds(sized("aten.mm(float32[4000])", 32000)) == pytest.approx(32e-6)
    assert times.seconds(sized("aten.view(float32[4000])", 0)) == 1e-6


TEXT = """
devices = 2
[device]
name = "d"
memory = 1e10
memory_bandwidth = 1e10
together = [[1, 1.5], [2, 1]]
step_seconds = 1e-3
[device.peak]
float32 = 1e11
[[links]]
level = "node"
size = 2
latency = 1e-5
bandwidth = 1e9
overlaps = false
[calls]
"aten.mm(float32[2,2])" = [1e-6, 16, 48, "float32"]
"""


def test_a_cluster_file_has_what_ranks_share_and_calls() -> None:
    found = parse_cluster(TEXT, "mine.toml", "mine")
    assert found.device.together == ((1, 1.5), (2, 1.0))
    assert found.calls == (CallTime("aten.mm(float32[2,2])", 1e-6, 16, 48, "float32"),)
    assert not found.links[0].overlaps
    with pytest.raises(ConfigError, match=r"together = \[\[2, 1\], \[1, 1\]\]; it is points"):
        parse_cluster(TEXT.replace("[[1, 1.5], [2, 1]]", "[[2, 1], [1, 1]]"), "mine.toml", "mine")
    with pytest.raises(ConfigError, match=r"aten.mm.* = \[-1, 16, 48, 'float32'\]; it is \[seconds, flops, bytes"):
        parse_cluster(TEXT.replace("1e-6, 16", "-1, 16"), "mine.toml", "mine")
    with pytest.raises(ConfigError, match="step_seconds = -1 is not credible"):
        parse_cluster(TEXT.replace("1e-3", "-1"), "mine.toml", "mine")


@functools.cache
def simulator(cluster: str = "h100", layers: int = 4) -> Simulator:
    batch = {"x": torch.zeros(8, 16, dtype=torch.int64), "y": torch.zeros(8, 16, dtype=torch.int64)}
    return Simulator(BytesGPT(layers=layers, width=32, heads=4, sequence=16), loss_fn, batch, cluster)


@functools.cache
def step(plan: str) -> StepPrediction:
    return simulator().simulate(Plan.parse(plan), False)


def test_attention_reaches_what_the_device_says_and_skips_what_is_masked() -> None:
    """As in the closed form of a transformer's step, which reads the same table."""
    found = step("")
    calls = [call for graph in found.program.graphs.values() for call in graph if isinstance(call, OpCall)]
    forward = [call for call in calls if call.attention and call.phase == "forward"]
    assert len(forward) == 4
    products = 2 * 2 * 8 * 16 * 16 * 32  # two of 8 rows, 16 positions by 16, width 32
    assert sum(call.flops for call in forward) == 4 * products / 2
    assert not any(call.attention for call in calls if call.signature.startswith("aten.mm"))
    times, device = CallTimes(find_cluster("h100")), find_cluster("h100").device
    plain = op_time(device, forward[0].flops, forward[0].num_bytes, "float32")
    assert times.seconds(forward[0]) == pytest.approx(plain / device.attention_efficiency)
    assert device.attention_efficiency < 0.5


PLANS = ["data=2 micro=2", "data=2 zero=1", "data=2 zero=3", "tensor=2", "data=2 pipeline=2 micro=4"]


@pytest.mark.parametrize("plan", PLANS)
def test_bytes_by_link_are_those_of_the_collectives(plan: str) -> None:
    found = step(plan)
    lowered = simulator()._estimator(0).program(Plan.parse(plan))
    sent = {}
    for one in step_collectives(lowered, eager_graphs(lowered)):
        if lowered.plan.mesh.axis_size(one.axis) > 1:
            sent[one.stage] = sent.get(one.stage, 0.0) + one.sent_bytes
    pipeline = found.program.pipeline
    if pipeline is not None:
        for (rank, _), num_bytes in pipeline.messages.items():
            sent[rank] += num_bytes
        losses = CollectiveKind.ALL_REDUCE.sent_bytes(8 * 4, 2)  # of 4 microbatches, in float64
        sent = {rank: num + losses for rank, num in sent.items()}
    assert found.sent == {"node": max(sent.values())}


@pytest.mark.parametrize("plan", PLANS[::2])
def test_memory_is_what_plait_memory_predicts(plan: str) -> None:
    of_two = simulator(layers=2)
    found = of_two.simulate(Plan.parse(plan), True)
    assert found.memory is not None
    assert found.peak_memory == of_two._estimator(0).estimate(Plan.parse(plan)).peak
    assert found.fits


@pytest.mark.parametrize("plan", PLANS)
def test_a_rank_is_at_every_moment_in_one_span_or_waits(plan: str) -> None:
    """The spans of each rank that are not transfers beside it follow one another without a gap, to the end."""
    found, ends = step(plan), []
    for rank in range(found.trace.num_ranks):
        now = 0.0
        for span in sorted(found.trace.of_rank(rank), key=lambda each: (each.start, each.end)):
            if span.kind != "send":
                assert span.start == pytest.approx(now, abs=1e-12)
                now = span.end
        ends.append(now)
    assert max(ends) == pytest.approx(found.seconds)


def test_flops_are_those_of_the_model_whatever_the_plan() -> None:
    one, cut = step(""), step("data=2 pipeline=2 micro=4")
    assert cut.program.model_flops == one.program.model_flops
    per_token = 6 * sum(p.numel() for n, p in BytesGPT(4, 32, 4, 16).named_parameters() if "embed" not in n)
    assert one.program.model_flops == pytest.approx(per_token * 8 * 16, rel=0.5)
    assert step("recompute=layer").program.model_flops == one.program.model_flops
    assert step("recompute=layer").seconds > one.seconds
    assert one.mfu < 1
    assert one.tokens_per_second == pytest.approx(16 * one.rows_per_second)


def test_a_place_stands_for_all_its_ranks() -> None:
    found = step("data=2 pipeline=2 micro=4")
    assert found.simulated.ranks == (0, 2)
    assert found.trace.num_ranks == 2


@pytest.mark.parametrize("layers", [4, 18])
def test_an_update_takes_time_for_each_parameter_too(layers: int) -> None:
    """Of a model of many equal layers too, of which few are lowered."""
    plan, fast = Plan(), find_cluster("h100")
    slow = replace(fast, device=replace(fast.device, update_seconds=1e-3))
    batch = {"x": torch.zeros(8, 16, dtype=torch.int64), "y": torch.zeros(8, 16, dtype=torch.int64)}
    model = BytesGPT(layers=layers, width=32, heads=4, sequence=16)
    before, after = (Simulator(model, loss_fn, batch, where).simulate(plan, False) for where in (fast, slow))
    assert after.seconds - before.seconds == pytest.approx(1e-3 * len([*model.parameters()]))


@pytest.mark.parametrize(("plan", "sums"), [("data=2", 0), ("data=2 zero=1", 1), ("pipeline=2 micro=2", 1)])
def test_clipping_reads_gradients_for_their_norm_and_writes_them(plan: str, sums: int) -> None:
    """And squares of the parts of ranks are summed."""
    text = {"x": torch.zeros(8, 16, dtype=torch.int64), "y": torch.zeros(8, 16, dtype=torch.int64)}
    found = plait.simulate(BytesGPT(4, 32, 4, 16), loss_fn, text, plan, "h100", clip_norm=1.0, memory=False)
    norms, clip, update = (call for call in found.program.updates[0] if isinstance(call, OpCall))
    assert clip.num_bytes == 2 * norms.num_bytes == 2 * 4 * int(update.signature.split(" of ")[1].split()[0])
    assert sum("squares" in call.signature for call in found.program.updates[0]) == sums
    assert found.simulated.times["update"] > step(plan).simulated.times["update"]


def test_replicas_that_agree_later_take_the_step_of_one_and_a_part_of_an_exchange() -> None:
    h100 = find_cluster("h100x2")
    device = replace(h100.device, together=((1, 1.5), (2, 1.0)))  # a replica is no faster than other ranks
    slow = replace(h100, device=device, links=(replace(h100.links[0], bandwidth=1e6), *h100.links[1:]))
    model = BytesGPT(layers=1, width=32, heads=4, sequence=16)
    text = {name: torch.zeros(8, 16, dtype=torch.int64) for name in "xy"}
    of = Simulator(model, loss_fn, text, slow)
    plans = (
        "data=2",
        "data=2 sync=8",
        "data=2 sync=8 outer=nesterov overlap=1 streaming=2",
        "data=2 compress=powersgd:1",
    )
    one, found, hidden, few = (of.simulate(Plan.parse(plan), False) for plan in plans)
    num_bytes = 4 * sum(p.numel() for p in model.parameters())
    whole = collective_time(CollectiveKind.ALL_REDUCE, num_bytes, (0, 1), slow)
    assert found.exchanges == pytest.approx(whole / 8)
    assert hidden.exchanges == pytest.approx((whole - 2 * hidden.simulated.seconds) / 8)
    assert found.sent == {"node": num_bytes / 8} and few.sent["node"] < num_bytes / 4
    assert found.tokens_per_second == pytest.approx(8 * 16 / found.seconds) and "exchanges" in str(found)
    assert one.mfu < found.mfu < hidden.mfu < 1
    assert "not counted: what coding and decoding of compress=powersgd:1" in str(few) and "not counted" not in str(one)
    plain = Simulator(model, loss_fn, text, replace(slow, device=h100.device)).simulate(Plan.parse(plans[1]), False)
    assert found.simulated.times == plain.simulated.times


def test_what_is_refused() -> None:
    with pytest.raises(PlanError, match="push and pull at times of their own; simulate the plan of one of them"):
        step("workers=2 servers=1")
    with pytest.raises(PlanError, match=r"has 16 ranks .*the cluster h100 has 8 devices; take a larger cluster"):
        simulator().simulate(Plan.parse("data=2 tensor=2 pipeline=4 micro=4"), False)
    with pytest.raises(PlanError, match="the memory was not predicted"):
        _ = step("data=2 zero=1").peak_memory
    with pytest.raises(ConfigError, match="there is no cluster 'h10'"):
        plait.simulate(BytesGPT(1, 32, 4, 16), loss_fn, {}, "", "h10")


def test_a_job_on_the_command_line(tmp_path: Path) -> None:
    file = str(Path(__file__).parent.parent / "examples" / "bytes_gpt.toml")
    page = tmp_path / "page.html"
    plan = "data=2 zero=1"
    result = CliRunner().invoke(
        app, ["simulate", file, "--plan", plan, "--cluster", "h100x8", "--set", "model.layers=2", "--html", str(page)]
    )
    assert result.exit_code == 0, result.output
    for text in ("32 rows, 4096 tokens a step", "MFU", "utilisation", "collectives", "optimizer", "node"):
        assert text in result.output
    assert plan in page.read_text()


def test_a_group_is_measured_where_it_lies() -> None:
    """Ranks of an axis that spans nodes talk over the link between them."""
    cluster = find_cluster("h100x16")
    mesh = Mesh((("data", 2), ("tensor", 8)))
    steps = StepSimulator(cluster)
    across = StepProgram(mesh, {}, (), ((),))
    found = steps.collective_seconds(across, AxisCollective(CollectiveKind.ALL_REDUCE, "data", 1 << 20), 0)
    assert found == collective_time(CollectiveKind.ALL_REDUCE, 1 << 20, range(0, 16, 8), cluster)


def op(name: str) -> OpCall:
    return OpCall(f"{name}(float32[2])", "forward", num_bytes=8.0)


def test_what_a_layer_adds_is_repeated_where_it_stands() -> None:
    """A wait belongs to the start of its own layer, also where that lies in the layer before."""
    begin = CollectiveCall("start()", "forward", (GRADIENTS,), "start", stream="data")

    def gathered(layers: int) -> list[OpCall | CollectiveCall]:
        calls: list[OpCall | CollectiveCall] = [op("embed"), begin]
        for _ in range(layers):
            at = max(i for i, call in enumerate(calls) if call is begin)
            calls += [begin, replace(begin, part="wait", begun=at), op("layer")]
        last = max(i for i, call in enumerate(calls) if call is begin)
        return [*calls, replace(begin, part="wait", begun=last), op("head")]

    assert with_layers(gathered(1), gathered(2), 3) == tuple(gathered(4))
    assert with_layers(gathered(1), gathered(2), 0) == tuple(gathered(1))
    assert with_layers([op("embed"), op("other")], gathered(2), 3) is None


def test_buckets_have_the_bytes_of_all_layers() -> None:
    def summed(num_bytes: int) -> CollectiveCall:
        return CollectiveCall(
            "start()", "backward", (AxisCollective(CollectiveKind.ALL_REDUCE, "data", num_bytes),), "start"
        )

    found = with_layers([op("a"), summed(10)], [op("a"), op("a"), summed(14)], 5)
    assert found == (op("a"),) * 6 + (summed(30),)


class Deep(torch.nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.enter = torch.nn.Linear(8, 16)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(layers))
        self.leave = torch.nn.Linear(16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.leave(x)


@functools.cache
def deep() -> Simulator:
    batch = {"x": torch.zeros(64, 8), "y": torch.zeros(64, 1)}

    def loss(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return (model(batch["x"]) - batch["y"]).square().mean()

    return Simulator(Deep(DEEP + 2), loss, batch, "h100x64")


@pytest.mark.parametrize(
    "plan", ["data=2", "data=2 zero=3", "data=2 zero=1 pipeline=6 micro=8", "pipeline=2 micro=4 chunks=3"]
)
def test_a_deep_model_is_simulated_from_a_few_of_its_layers(plan: str) -> None:
    """As if all of it were lowered, where stages have equal layers: 18 over 6 stages."""
    given = Plan.parse(f"{plan} schedule=interleaved" if "chunks" in plan else plan)
    whole = given if len(given.copies) == 1 else replace(given, cut=tuple(f"layers.{3 * i}" for i in range(1, 6)))
    few = deep().simulate(given, memory=False)
    if "chunks" not in plan:  # whose stages a cut cannot name
        all_of_it = deep().simulate(whole, memory=False)
        assert few.seconds == pytest.approx(all_of_it.seconds, rel=0.03)
        assert few.sent["node"] == pytest.approx(all_of_it.sent["node"], rel=0.05)
        assert few.program.model_flops == all_of_it.program.model_flops
    assert few.trace.num_ranks == len(given.copies)
    assert few.memory is None


def test_layers_lie_where_memory_and_the_output_layer_leave_room() -> None:
    assert layers_of_stages(126, 16) == [7, *[8] * 14, 7]
    assert layers_of_stages(8, 4) == [2] * 4
    assert equal_layers(Deep(3)) == Layers("layers", 3)
    assert equal_layers(torch.nn.Linear(2, 2)) is None
    places: list[Any] = [None, None]  # of a list with no module in some, as models with optional layers have
    assert equal_layers(torch.nn.Sequential(torch.nn.ModuleList(places))) is None
    few = with_fewer(Deep(5), Layers("layers", 5), 2)
    assert len(few.layers) == 2
    assert few(torch.zeros(1, 8)).shape == (1, 1)
