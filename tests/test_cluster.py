"""Clusters as values and files, and the time of ops and collectives on them."""

from __future__ import annotations

import math
import tomllib
from importlib.resources import files
from pathlib import Path

import pytest
import torch

from plait.api.job.gpt import BytesGPT, loss_fn
from plait.compile.stage_costs import estimate_costs
from plait.cost.collective_time import CollectiveKind, collective_time, send_time
from plait.cost.op_time import op_time
from plait.engine import compiler
from plait.engine.compiler import Captures, Compiler
from plait.errors import ConfigError, PlanError
from plait.plan.plan import Plan
from plait.spec import cluster_file
from plait.spec.cluster import Cluster, DeviceSpec, EfficiencyCurve, LinkSpec
from plait.spec.cluster_file import NUMBERS, cluster_of_device, find_cluster, parse_cluster, shipped

SUMS, GATHERS = CollectiveKind.ALL_REDUCE, CollectiveKind.ALL_GATHER
ALL = (SUMS, GATHERS, CollectiveKind.REDUCE_SCATTER, CollectiveKind.ALL_TO_ALL, CollectiveKind.BROADCAST)
PLAIN = DeviceSpec("plain", (("float32", 1e12),), 1e9, 1e11)
FLAT = Cluster("flat", 8, PLAIN, (LinkSpec("node", 0.0, 1e9),))
NODES = Cluster("nodes", 32, PLAIN, (LinkSpec("node", 1e-6, 100e9, size=8), LinkSpec("pod", 1e-5, 10e9, at_once=8)))


def text_of(name: str) -> str:
    return (files("plait.spec") / "clusters" / f"{name}.toml").read_text()


def test_what_is_shipped() -> None:
    wanted = {"h100", "h200", "a100", "v100", "b200", "tpu-v4", "tpu-v5e", "tpu-v5p", "tpu-v6e", "rtx4090", "two-sites"}
    assert wanted | {"cpu", "h100-700w"} <= {*shipped()}
    assert find_cluster("h100").device.peak_of("bfloat16") == 989.4e12
    assert find_cluster("a100x1024").num_devices == 1024


@pytest.mark.parametrize("name", shipped())
def test_every_shipped_number_has_a_source(name: str) -> None:
    raw = tomllib.loads(text_of(name))
    sources = raw["sources"]
    tables = {"": raw, "device": raw["device"], "host": raw.get("host", {})} | {
        f"links{i}": each for i, each in enumerate(raw["links"])
    }
    paths = []
    for table, values in tables.items():
        paths += [
            f"{table.rstrip('0123456789')}.{key}".lstrip(".")
            for key, value in values.items()
            if isinstance(value, int | float | list) and not isinstance(value, bool) and key not in ("matches", "links")
        ]
    paths += [f"device.peak.{dtype}" for dtype in raw["device"]["peak"]]
    lacking = [path for path in paths if not any(path == key or path.startswith(f"{key}.") for key in sources)]
    assert lacking == []
    assert all(sources.values())


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("h10x8", "there is no cluster 'h10x8'; did you mean h100"),
        ("h100x12", "12 devices on level pod are not whole domains of 8; give a multiple of 8 devices"),
        ("h100x0", "give 1 or more, like h100x8"),
        ("h100x1000000000", "has more than 10000000 devices; give as many at most"),
        ("h100x" + 5000 * "8", "has more than 10000000 devices"),
        ("rtx4090x16", "level node joins 8 at most; give 8 devices, or a further level"),
        ("nowhere.toml", "there is no cluster file 'nowhere.toml'"),
    ],
)
def test_names_that_are_no_clusters(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        find_cluster(name)


@pytest.mark.parametrize(
    ("line", "instead", "message"),
    [
        ("memory = 80e9", "", "device.memory is missing; it is in bytes; look it up in NVIDIA H100"),
        ("bandwidth = 450e9", "bandwidth = 900", "links.bandwidth = 900 is not credible.*not bits.*NVIDIA H100"),
        ("bandwidth = 450e9", "bandwidth = 9e12", "level node is above device.memory_bandwidth = 3.35e"),
        ("float32 = 67e12", "", "device.peak.float32 is missing"),
        ("bfloat16 = 989.4e12", "bfloat16 = 989.4", "device.peak.bfloat16 = 989.4 is not credible.*without sparsity"),
        ("bfloat16 = 989.4e12", "bloat16 = 989.4e12", "unknown dtype device.peak.bloat16; did you mean bfloat16"),
        ("bfloat16 = 989.4e12", "bfloat16 = nan", "device.peak.bfloat16 = nan is not credible"),
        ("latency = 3.4e-6", "latency = -1", "links.latency = -1 is not credible.*NCCL"),
        ("efficiency = 0.8\n", "efficiency = 1.8\n", "a fraction above 0 and at most 1, or points"),
        ("memory_efficiency = ", "memory_eficiency = 0.5 #", "unknown key device.memory_eficiency; did you mean"),
        ('level = "node"', 'level = "rack"', "links.level = 'rack'; the levels are package, node"),
        ("ram = 2e12", "ram = 2048", "host.ram = 2048 is not credible"),
        ("devices = 8", "", "devices is missing"),
        ("devices = 8", "devices = 8.5", "devices = 8.5 is not credible; it is in devices, .* a whole number from 1"),
        ("cores = 112", "cores = 1.5", "host.cores = 1.5 is not credible"),
        ("[device]", "[device]\ntogether = [[inf, 1]]", r"together = \[\[inf, 1\]\]; it is points \[ranks"),
        ("[device]", "[device]\ntogether = [[1, 1], [2, inf]]", "speeds that do not rise"),
        ("[device]", "[device]\ntogether = [[1, 1], [2, 3]]", "speeds that do not rise"),
        ("[device]", "[device]\ntogether = [[1.5, 1]]", r"together = \[\[1.5, 1\]\]; it is points"),
        ("[device]", "[device]\nstep_seconds = inf", "device.step_seconds = inf is not credible"),
        ("[device]", "[device]\nin_step = true", "device.in_step = True is not credible"),
        ("matches = ", "matches = 5 #", r"device.matches = 5; it is a list of texts"),
        ("devices = 8", 'devices = 8\ncollectives = [["sum", 2, 1, 8, 1.0]]', "kind is one of all_reduce"),
        ("devices = 8", 'devices = 8\ncollectives = [["halo", inf, 1, 8, 1.0]]', "collectives has .'halo', inf"),
        ("devices = 8", 'devices = 8\ncollectives = [["halo", 9, 1, 8, 1.0]]', "of groups of 8 devices"),
        ("devices = 8", 'devices = 8\ncalls = {"aten.mm" = [1.0, inf, 8, "float32"]}', r"it is \[seconds, flops"),
        ("[device]", "[gadget]", "unknown key gadget; the keys here are"),
        ("cores = 112", "cores = ", "is not valid TOML"),
        ("cores = 112", "cores = " + 5000 * "1", "is not valid TOML: a number has more than 4300 digits"),
        ("cores = 112", "cores = " + 5000 * "[" + 5000 * "]", "is not valid TOML: its tables or arrays are nested too"),
    ],
)  # fmt: skip
def test_bad_files(tmp_path: Path, line: str, instead: str, message: str) -> None:
    text = text_of("h100")
    assert line in text
    (tmp_path / "mine.toml").write_text(text.replace(line, instead, 1))
    with pytest.raises(ConfigError, match=message):
        find_cluster(tmp_path / "mine.toml")


def test_collectives_of_a_file_are_those_that_there_are() -> None:
    assert tuple(kind.title for kind in CollectiveKind) == cluster_file._COLLECTIVES


def test_a_file_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(text_of("a100").replace("devices = 8", "devices = 32"))
    found = find_cluster(tmp_path / "mine.toml")
    assert (found.name, found.num_devices, found.sizes) == ("mine", 32, (8, 32))


def test_levels_stand_in_order() -> None:
    with pytest.raises(ConfigError, match="innermost first: package, node"):
        Cluster("c", 8, PLAIN, (LinkSpec("pod", 0, 1), LinkSpec("node", 0, 1)))
    with pytest.raises(ConfigError, match="has no links"):
        Cluster("c", 8, PLAIN, ())


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
@pytest.mark.parametrize("num_devices", [1, 3, 8, 9, 100])
def test_the_machine_of_a_step(kind: str, num_devices: int) -> None:
    found = cluster_of_device(kind, "", num_devices)
    assert found.num_devices >= num_devices
    assert found.device.overlaps == (kind == "cuda")
    assert cluster_of_device("cuda", "NVIDIA H200", 8).device.memory == 141e9
    assert cluster_of_device("cuda", "NVIDIA H100 80GB HBM3", 8).device.memory == 80e9


def test_a_step_is_compiled_for_the_machine_that_it_runs_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU by round numbers, on an accelerator by those of the description that names it."""
    batch = {"x": torch.zeros(4, 8, dtype=torch.int64), "y": torch.zeros(4, 8, dtype=torch.int64)}
    captures = Captures(BytesGPT(layers=2, width=16, heads=2, sequence=8), loss_fn)
    found = {}
    for kind in ("cpu", "cuda"):
        monkeypatch.setattr(compiler, "device_type", lambda graph, kind=kind: kind)
        monkeypatch.setattr(compiler, "device_name", lambda kind: "NVIDIA H200" if kind == "cuda" else "")
        program = Compiler(captures, Plan.parse("pipeline=2 micro=2")).compiled(batch).program
        costs = estimate_costs(program, {cell: each.graph for cell, each in program.pipeline.cells.graphs.items()})
        found[kind] = program.cluster, costs
    assert found["cpu"][0].device.peak_of("float32") == 1e11
    assert found["cpu"][1].bytes_per_second == 2.5e9
    assert found["cuda"][0].device.memory == 141e9
    assert found["cuda"][1].bytes_per_second == 450e9 * 0.8
    assert all(after > 0 for after in found["cuda"][1].forward)


def test_efficiency_is_linear_in_the_logarithm_of_the_size() -> None:
    curve = EfficiencyCurve(((1e3, 0.2), (1e5, 0.6)))
    assert [curve.at(size) for size in (1, 1e3, 1e4, 1e5, 1e9)] == [0.2, 0.2, 0.4, 0.6, 0.6]


def test_an_op_takes_the_longer_of_arithmetic_and_memory_or_their_sum() -> None:
    assert op_time(PLAIN, 1e12, 2e11, "float32") == 2.0
    serial = DeviceSpec("serial", PLAIN.peak, 1e9, 1e11, overlaps=False, op_seconds=0.5)
    assert op_time(serial, 1e12, 2e11, "bfloat16") == 3.5


@pytest.mark.parametrize(("size", "stride"), [(8, 1), (4, 2), (2, 1)])
def test_a_ring_within_a_node_is_the_formula(size: int, stride: int) -> None:
    group = range(0, size * stride, stride)
    for kind, ways in ((SUMS, 2), (GATHERS, 1), (CollectiveKind.REDUCE_SCATTER, 1)):
        assert collective_time(kind, 1e9, group, FLAT, "ring") == ways * (size - 1) / size
        assert collective_time(kind, 1e9, group, FLAT, "hierarchical") == ways * (size - 1) / size


def test_groups_that_share_a_link_have_a_part_of_it() -> None:
    """A group with one rank on each node: eight such groups send at once, over eight cards or over one."""
    group, one_card = range(0, 32, 8), Cluster("c", 32, PLAIN, (NODES.links[0], LinkSpec("pod", 1e-5, 10e9, at_once=1)))
    times = [collective_time(GATHERS, 8e9, group, each, "ring") for each in (NODES, one_card)]
    assert times == pytest.approx([3e-5 + 0.75 * 0.8, 3e-5 + 0.75 * 6.4])


def test_forms_of_an_all_reduce_over_nodes() -> None:
    forms = ("ring", "tree", "hierarchical")
    small, large = (
        {form: collective_time(SUMS, size, range(32), NODES, form) for form in forms} for size in (1e3, 1e10)
    )
    assert min(small, key=lambda form: small[form]) == "tree"
    assert min(large, key=lambda form: large[form]) == "ring"  # all links of a node are busy all the time
    hierarchical = 2 * (7 / 8 * 1e10 / 100e9 + 3 / 4 * 1e10 / 8 / 10e9 + 7e-6 + 3e-5)
    assert large["hierarchical"] == pytest.approx(hierarchical)
    assert collective_time(SUMS, 1e10, range(32), NODES) == large["ring"]


def test_rings_on_a_torus_use_the_links_of_its_axes() -> None:
    torus = Cluster("torus", 64, PLAIN, (LinkSpec("pod", 0.0, 10e9, at_once=6, torus=True),))
    assert collective_time(GATHERS, 64e9, range(4), torus, "ring") == pytest.approx(64 * 3 / 4 / 20)
    assert collective_time(GATHERS, 64e9, range(64), torus, "ring") == pytest.approx(63 / 60)
    assert collective_time(CollectiveKind.ALL_TO_ALL, 16e9, range(16), torus) == pytest.approx(15 * 4 / 20)


@pytest.mark.parametrize("name", ["h100x64", "tpu-v5ex512", "two-sites", "cpu"])
@pytest.mark.parametrize("kind", ALL)
def test_times_are_positive_and_grow(name: str, kind: CollectiveKind) -> None:
    cluster = find_cluster(name)
    if cluster.num_devices == 1:
        assert collective_time(kind, 1e6, range(1), cluster) == 0.0
        return
    times = [collective_time(kind, size, range(cluster.num_devices), cluster) for size in (0, 1, 1e6, 1e9)]
    assert times == sorted(times)
    assert times[0] == 0.0
    assert all(0 < time < math.inf for time in times[1:])


def test_an_unknown_form() -> None:
    with pytest.raises(PlanError, match="all_gather has no form 'tree'; it has ring, hierarchical"):
        collective_time(GATHERS, 1.0, range(8), FLAT, "tree")


def test_a_message_takes_the_link_that_both_ranks_have() -> None:
    assert send_time(1e9, 0, 7, NODES) == 1e-6 + 0.01
    assert send_time(1e9, 0, 8, NODES) == 1e-5 + 0.1
    assert send_time(1e9, 3, 3, NODES) == 0.0


def test_groups_of_many_ranks_spread_over_levels() -> None:
    cluster = find_cluster("h100x16384")
    assert cluster.spread(range(0, 16384, 8)) == (1, 2048)
    assert cluster.spread(range(16384)) == (8, 2048)
    assert cluster.spread((0, 1, 8, 9)) == (2, 2)


def test_numbers_say_where_to_look() -> None:
    assert all(row.unit and row.look and row.least < row.most for row in NUMBERS.values())
    with pytest.raises(ConfigError, match="host.nics is missing; it is in network cards; look it up in ip link"):
        parse_cluster(text_of("h100").replace("nics = 8", "").replace('"host" =', '"hosts" ='), "f.toml", "f")
