"""The sharding plan: what plans make of the parameters of a step, as text."""

from __future__ import annotations

from textwrap import dedent

import pytest

from plait.plan.plan import Plan
from plait.plan.sharding_plan import Gather, ShardingPlan, sharding_plan
from plait.spec.layout import Layout

# What sharding finds of a model: a large table, a weight that tensor cuts, a bias, one number, and one that is frozen.
WHOLE = {
    "table": "f32[512, 64]",
    "up": "f32[256@tensor, 64]",
    "bias": "f32[6]",
    "scale": "f32[]",
    "fixed": "f32[64, 64]",
}
TIED = {  # of four stages: the first and the last read the table
    "table": "f32[512, 64] only:pipeline=0,3",
    "up": "f32[256@tensor, 64] only:pipeline=1",
    "bias": "f32[6] only:pipeline=1",
    "scale": "f32[] only:pipeline=2",
    "fixed": "f32[64, 64] only:pipeline=2",
}
SUMS = {"table": ("data",), "up": ("data",), "bias": ("data", "tensor"), "scale": ("data",)}
TIED_SUMS = SUMS | {"table": ("data", "pipeline")}


def made(
    plan: str, layouts: dict[str, str] = WHOLE, sums: dict[str, tuple[str, ...]] = SUMS, device: str = "cpu"
) -> ShardingPlan:
    parsed = {name: Layout.parse(text) for name, text in layouts.items()}
    return sharding_plan(Plan.parse(plan), parsed, frozen=["fixed"], reduce_axes=sums, device=device)


def text(lines: str) -> str:
    return dedent(lines).strip()


def test_without_zero_everything_is_as_the_graph_reads_it() -> None:
    assert str(made("data=4 tensor=2")) == text("""
        table  f32[512, 64]; summed over data
        up     f32[256@tensor, 64]; summed over data
        bias   f32[6]; summed over data, tensor
        scale  f32[]; summed over data
        fixed  f32[64, 64]; frozen
    """)
    assert made("data=4 tensor=2").axis == ""


def test_zero_1_and_2_gather_after_an_update() -> None:
    expected = text("""
        table  f32[512, 64]; state f32[512@data, 64]; gathered after each update; summed over data
        up     f32[256@tensor, 64]; state f32[256@tensor, 64@data]; gathered after each update; summed over data
        bias   f32[6]; state f32[6@data]; gathered after each update; summed over data, tensor
        scale  f32[]; summed over data
        fixed  f32[64, 64]; frozen
    """)
    one, two = made("data=4 tensor=2 zero=1"), made("data=4 tensor=2 zero=2")
    assert str(one) == str(two) == expected
    assert (one.sums_each_microbatch, two.sums_each_microbatch) == (False, True)
    assert one.parameters["table"].held == Layout.parse("f32[512, 64]")


def test_zero_3_cuts_what_is_frozen_too() -> None:
    found = made("data=4 tensor=2 zero=3")
    assert str(found) == text("""
        table  f32[512, 64]; state f32[512@data, 64]; gathered for each use; summed over data
        up     f32[256@tensor, 64]; state f32[256@tensor, 64@data]; gathered for each use; summed over data
        bias   f32[6]; state f32[6@data]; gathered for each use; summed over data, tensor
        scale  f32[]; summed over data
        fixed  f32[64, 64]; state f32[64@data, 64]; gathered for each use; frozen
    """)
    assert found.gathered(Gather.USE) == ["table", "up", "bias", "fixed"] and not found.gathered(Gather.UPDATE)
    assert found.parameters["table"].held == found.states["table"] == Layout.parse("f32[512@data, 64]")


@pytest.mark.parametrize("zero", [1, 3])
def test_tied_weights_lie_on_two_stages_and_are_summed_over_them(zero: int) -> None:
    when = {1: "after each update", 3: "for each use"}[zero]
    found = str(made(f"pipeline=4 data=2 zero={zero} micro=8", TIED, TIED_SUMS)).splitlines()
    assert found[0] == (
        f"table  f32[512, 64] only:pipeline=0,3; state f32[512@data, 64] only:pipeline=0,3; gathered {when}; summed"
        " over data, pipeline"
    )
    assert found[3] == "scale  f32[] only:pipeline=2; summed over data"


def test_a_parameter_on_one_rank_of_another_axis_is_not_cut() -> None:
    found = made("data=2 tensor=2 zero=3", {"branch": "f32[64, 64] only:tensor=1"}, {})
    assert str(found) == "branch  f32[64, 64] only:tensor=1"


def test_central_storage_is_shared_and_gathers_nothing() -> None:
    found = made("data=4 central=host")
    assert str(found) == text("""
        table  f32[512, 64]; state f32[512@data, 64]; summed over data; shared
        up     f32[256@tensor, 64]; state f32[256@tensor, 64@data]; summed over data; shared
        bias   f32[6]; state f32[6@data]; summed over data, tensor; shared
        scale  f32[]; summed over data
        fixed  f32[64, 64]; shared; frozen
    """)
    assert found.sums_each_microbatch and not found.updates_on_host
    assert made("data=4 central=host", device="cuda").updates_on_host
    assert not any(each.shared for each in made("central=host").parameters.values())  # of one rank


def test_large_parameters_are_kept_on_disk() -> None:
    assert str(made("data=2 zero=1 home.parameters=disk")) == text("""
        table  f32[512, 64]; state f32[512@data, 64]; gathered after each update; summed over data; on disk; gradient on disk
        up     f32[256@tensor, 64]; state f32[256@tensor, 64@data]; gathered after each update; summed over data; on disk; gradient on disk
        bias   f32[6]; state f32[6@data]; gathered after each update; summed over data, tensor
        scale  f32[]; summed over data
        fixed  f32[64, 64]; frozen
    """)  # noqa: E501


def test_host_memory_is_the_memory_of_a_cpu() -> None:
    plan = "home.parameters=host home.optimizer=host"
    assert not made(plan).away and not made(plan).gradients_away and not made(plan).updates_on_host
    found = made(plan, device="cuda")
    assert found.away == found.gradients_away == {"table", "up"} and found.updates_on_host
    assert {each.memory for each in found.parameters.values()} == {"host", "device"}
    found = made("home.optimizer=host", device="cuda")  # the gradient goes to where the update is
    assert not found.away and found.gradients_away == {"table", "up"}
    assert found.parameters["table"].gradient_memory == "host"
    assert made("home.optimizer=disk").gradients_away == frozenset()


@pytest.mark.parametrize(
    ("home", "device", "memory"),
    [("host", "cpu", "device"), ("host", "cuda", "host"), ("disk", "cpu", "disk"), ("device", "cuda", "device")],
)
def test_where_activations_are_kept(home: str, device: str, memory: str) -> None:
    assert made(f"home.activations={home}", device=device).activation_memory == memory


def test_graphs_may_read_a_narrower_dtype() -> None:
    found = made("data=2 zero=1").read_as({"up": "bf16"})
    assert str(found).splitlines()[1] == (
        "up     bf16[256@tensor, 64]; state f32[256@tensor, 64@data]; gathered after each update; summed over data"
    )
    assert found.parameters["up"].narrow == "bf16" and found.parameters["table"].narrow is None


@pytest.mark.parametrize(
    ("layout", "state"),
    [
        ("f32[6, 8]", "f32[6, 8@data]"),  # the first that 4 divides
        ("f32[3, 5]", "f32[3, 5@data]"),  # the longest where none does
        ("f32[1, 1]", "f32[1, 1]"),
        ("f32[8@data, 4]", "f32[8@data, 4]"),  # cut over the axis already
        ("f32[12@replica, 4]", "f32[12@replica, 4@data]"),  # a dim that another axis cuts stays
    ],
)
def test_the_dim_that_is_cut(layout: str, state: str) -> None:
    found = made("data=4 replica=2 zero=2", {"weight": layout}, {})
    assert str(found.states["weight"]) == state
