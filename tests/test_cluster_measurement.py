"""`plait cluster measure`: what is fitted to times, and that the file is a cluster."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from bench import call_measurement
from bench.call_measurement import as_rows, distinct_calls, measure_calls, measure_updates
from plait.api import cluster_measurement, step_measurement
from plait.api.cli import app
from plait.api.cluster_measurement import MeasuredCollective, fit_link, measure_here, write_measured
from plait.api.job.gpt import BytesGPT, loss_fn
from plait.api.simulate_step import Simulator
from plait.api.step_measurement import StepOverhead, in_step_of
from plait.comm.launch import launch
from plait.cost.collective_time import collective_time
from plait.cost.step_simulation import StepSimulator
from plait.errors import ConfigError
from plait.plan.plan import Plan
from plait.spec.cluster import Cluster, DeviceSpec, LinkSpec
from plait.spec.cluster_file import find_cluster, parse_cluster


def test_a_link_is_found_from_the_times_of_collectives() -> None:
    link = LinkSpec("node", 2e-5, 3e9)
    cluster = Cluster("c", 4, DeviceSpec("d", (("float32", 1.0),), 1.0, 1e12), (link,))
    groups = (range(2), range(0, 4, 2), range(4))
    measured = []
    for group in groups:
        for kind in cluster_measurement._MEASURED:
            for num_bytes in (1 << 10, 1 << 20):
                seconds = collective_time(kind, num_bytes, group, cluster, cluster_measurement._FORMS[kind])
                measured.append(MeasuredCollective(kind, num_bytes, len(group), group.step, seconds))
    found = fit_link("node", 0, measured)
    assert found.latency == pytest.approx(link.latency)
    assert found.bandwidth == pytest.approx(link.bandwidth)


def test_a_measured_file_is_a_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_measurement, "_WIDTHS", {True: (16, 32), False: (16, 32)})
    monkeypatch.setattr(cluster_measurement, "_MOST_SECONDS", 0.001)
    monkeypatch.setattr(cluster_measurement, "_DISK", 1 << 12)
    monkeypatch.setattr(step_measurement, "_TOGETHER_SECONDS", 0.001)
    monkeypatch.setattr(step_measurement, "_YARDSTICK", {True: (1, 16, 2, 8, 2)})
    monkeypatch.setenv("PLAIT_TRACE", "traced")  # is of the user's own trainer
    monkeypatch.chdir(tmp_path)
    text = measure_here()
    out = tmp_path / "mine.toml"
    write_measured(text, out)
    found = find_cluster(out)
    assert [each.name for each in tmp_path.iterdir()] == ["mine.toml"]
    assert found.measured and found.num_devices == 1
    assert {dtype for dtype, _ in found.device.peak} >= {"float32", "bfloat16"}
    assert 0 < found.device.matmul_efficiency.at(1e3) <= 1
    assert min(found.device.op_seconds, found.device.view_seconds, found.device.step_seconds) > 0
    assert found.device.update_seconds > 0
    assert found.device.together == ((1, 1.0),)
    sizes = [size for size, _ in found.device.matmul_efficiency.points]
    assert sizes == pytest.approx([2.0 * 16**3, 8.0 * 16**3, 16.0 * 16**3, 64.0 * 16**3], rel=1e-3)
    assert found.host is not None and found.host.ram > 0
    with pytest.raises(ConfigError, match="cannot write the cluster file"):
        write_measured(text, tmp_path / "nowhere" / "mine.toml")


def test_a_machine_with_an_odd_name_and_no_disk_has_a_file_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_measurement, "_WIDTHS", {True: (16,), False: (16,)})
    monkeypatch.setattr(cluster_measurement, "_MOST_SECONDS", 0.001)
    monkeypatch.setattr(cluster_measurement, "_cpu", lambda: 'A "fast" \\ CPU')
    tried: list[Path] = []
    monkeypatch.setattr(cluster_measurement, "_disk_bandwidth", lambda folder: tried.append(folder) or 0.0)
    found = parse_cluster(measure_here(), "mine.toml", "mine")
    assert len(tried) == 2
    assert found.host is not None
    assert found.host.disk == 0.0
    assert found.host.cpu == 'A "fast" \\ CPU'


@pytest.mark.parametrize(
    ("out", "message"),
    [
        ("mine.cluster", "--out 'mine.cluster': a cluster is read from a file whose name ends in .toml; write mine"),
        ("nowhere/mine.toml", "cannot write the cluster file 'nowhere/mine.toml': there is no folder"),
        ("folder.toml", "cannot write the cluster file 'folder.toml': it is a folder"),
    ],
)
def test_a_file_that_cannot_be_is_named_before_anything_is_measured(
    out: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("folder.toml").mkdir()
    monkeypatch.setattr(cluster_measurement, "measure_here", lambda: pytest.fail("it was measured"))
    result = CliRunner().invoke(app, ["cluster", "measure", "--processes", "1", "--out", out])
    assert result.exit_code == 2
    assert message in result.output.replace("\n", " ")


def test_links_of_several_hosts_are_two_levels() -> None:
    measured = [
        MeasuredCollective(kind, num_bytes, 2, stride, seconds * (1 + num_bytes))
        for stride, seconds in ((1, 1e-9), (2, 1e-8))
        for kind in cluster_measurement._MEASURED
        for num_bytes in (1 << 10, 1 << 20)
    ]
    within, across = ([one for one in measured if one.stride == stride] for stride in (1, 2))
    products = {("float32", 1e6): 1e11, ("float32", 1e9): 2e11}
    copies = {1 << 12: 1e-7, 1 << 26: 1e-3}
    text = cluster_measurement._as_toml(
        cluster_measurement.torch.device("cpu"), 4, 2, products, copies, StepOverhead(1e-6, 1e-7, 2e-5, 1e-3),
        [(1, 1.5), (2, 1.0)], within, across, 0.01, (1e12, 1e8), 1.25,
    )  # fmt: skip
    found = parse_cluster(text, "measured.toml", "measured")
    assert [(link.level, size) for link, size in zip(found.links, found.sizes, strict=True)] == [
        ("node", 2),
        ("pod", 4),
    ]
    assert found.links[1].bandwidth < found.links[0].bandwidth
    assert [link.overlaps for link in found.links] == [False, True]  # memory that ranks share, and a network
    assert (found.device.op_seconds, found.device.view_seconds, found.device.step_seconds) == (1e-6, 1e-7, 1e-3)
    assert found.device.update_seconds == 2e-5
    assert [found.device.speed(num) for num in (1, 1.5, 2)] == [1.5, 1.25, 1.0]
    assert found.device.in_step == 1.25
    assert found.device.matmul_efficiency.at(1e6) == 0.5


def test_calls_of_a_step_are_measured_once_each_and_say_what_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_measurement, "_SECONDS", 0.0)
    monkeypatch.setattr(call_measurement, "_CACHE", 0)
    batch = {"x": torch.zeros(4, 8, dtype=torch.int64), "y": torch.zeros(4, 8, dtype=torch.int64)}
    simulator = Simulator(BytesGPT(2, 16, 2, 8), loss_fn, batch, "cpu")
    lowered = simulator._estimator(0).program(Plan())
    nodes = distinct_calls([lowered])
    host = torch.device("cpu")
    found = measure_calls(nodes, host) + measure_updates([lowered], functools.partial(torch.optim.AdamW, lr=1e-3), host)
    assert all(call.seconds > 0 for call in found)
    assert len({call.signature for call in found}) == len(found)
    text = "devices = 1\n[device]\nname = 'd'\nmemory = 1e10\nmemory_bandwidth = 1e10\n[device.peak]\nfloat32 = 1e11\n"
    text += "[[links]]\nlevel = 'node'\nsize = 0\nlatency = 1e-6\nbandwidth = 1e9\n" + as_rows(found)
    cluster = parse_cluster(text, "mine.toml", "mine")
    program = simulator.program(Plan())
    seconds = {call.signature: call.seconds for call in cluster.calls}
    calls = [*program.graphs["alone"], *program.updates[0]]
    missing = {call.signature.partition("(")[0] for call in calls if call.signature not in seconds}
    assert missing <= {"getitem"}
    alone = StepSimulator(cluster).simulate(program)
    assert alone.seconds == pytest.approx(sum(seconds.get(call.signature, 0.0) for call in calls))


def test_a_machine_is_held_against_a_step() -> None:
    """With the `in_step` that is found, the step that was measured takes what it took while all ranks computed."""
    batch = {"x": torch.zeros(4, 8, dtype=torch.int64), "y": torch.zeros(4, 8, dtype=torch.int64)}
    program = Simulator(BytesGPT(2, 16, 2, 8), loss_fn, batch, "cpu").program(Plan())
    device = DeviceSpec(
        "d", (("float32", 1e11),), 1e10, 1e10, op_seconds=1e-4, step_seconds=1e-3, together=((1, 1.5), (2, 1.0))
    )
    cluster = Cluster("mine", 2, device, (LinkSpec("node", 1e-6, 1e9),))
    alone = replace(cluster, device=replace(device, together=()))
    taken = 2 * StepSimulator(alone).simulate(program).seconds
    found = in_step_of(cluster, program, taken)
    assert 2 < found < 3  # what a step takes besides its calls stays
    held = replace(alone, device=replace(alone.device, in_step=found))
    assert StepSimulator(held).simulate(program).seconds == pytest.approx(taken)
    assert in_step_of(cluster, program, 1e9) == step_measurement._MOST
    assert in_step_of(cluster, program, 0.0) == step_measurement._LEAST


def test_ranks_in_processes_measure_together(tmp_path: Path) -> None:
    """What ranks measure one by one leaves nothing behind with which their steps could not be measured."""
    script = tmp_path / "measure.py"
    script.write_text(
        "from pathlib import Path\n"
        "from plait.api import cluster_measurement as measurement, step_measurement as steps\n"
        "measurement._WIDTHS = {True: (16,)}\n"
        "measurement._MOST_SECONDS = steps._TOGETHER_SECONDS = 0.001\n"
        "measurement._disk_bandwidth = lambda folder: 0.0\n"
        "steps._YARDSTICK, steps._DEPTHS, steps._RUNS = {True: (1, 16, 2, 8, 2)}, (1, 9), 3\n"
        "if text := measurement.measure_here():\n"
        f"    Path({str(tmp_path / 'mine.toml')!r}).write_text(text)\n"
    )
    assert launch([str(script)], 2, {"OMP_NUM_THREADS": "1"}) == 0
    found = find_cluster(tmp_path / "mine.toml")
    assert (found.num_devices, len(found.device.together), found.device.step_seconds > 0) == (2, 2, True)
