"""The plan as text: what it reads, prints and refuses."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.errors import PlanError
from plait.plan.key_values import Recompute
from plait.plan.plan import Plan
from plait.spec.mesh import Mesh


def test_reads_every_key() -> None:
    plan = Plan.parse(
        "pipeline=2 schedule=interleaved chunks=3 cut=a.1,b,c replica=2 data=2 tensor=3 zero=3 micro=4"
        " recompute=layer precision=bf16 precision.*.norm=fp32"
        " home.optimizer=disk batchnorm=local allreduce=ring bucket=512KiB"
    )
    assert plan == Plan(
        pipeline=2, schedule="interleaved", chunks=3, cut=("a.1", "b", "c"),
        replica=2, data=2, tensor=3, zero=3, micro=4,
        recompute=Recompute("layer"), precision="bf16",
        exceptions=(("*.norm", "fp32"),), home_optimizer="disk", batchnorm="local", allreduce="ring",
        bucket_bytes=512 * 1024,
    )  # fmt: skip
    assert plan.mesh == Mesh(
        (("pipeline", 2), ("replica", 2), ("data", 2), ("context", 1), ("expert", 1), ("tensor", 3), ("inner", 1))
    )
    assert plan.num_processes == 24


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("", ""),
        ("data=1", ""),
        ("tensor=2  data=4", "data=4 tensor=2"),
        ("tensor=2 data=1 bucket=25MiB allreduce=backend", "tensor=2"),
        ("bucket=1024KiB", "bucket=1MiB"),
        ("bucket=1500B", "bucket=1500B"),
    ],
)
def test_prints_canonically(text: str, canonical: str) -> None:
    assert str(Plan.parse(text)) == canonical


@given(
    st.builds(
        Plan,
        replica=st.integers(1, 4),
        data=st.integers(1, 64),
        zero=st.integers(0, 3),
        micro=st.integers(1, 64),
        recompute=st.sampled_from(
            [Recompute(), Recompute("layer"), Recompute("budget", 3 << 30), Recompute("pattern", pattern="*.mlp")]
        ),
        precision=st.sampled_from(["fp32", "bf16", "fp16", "bf16-params"]),
        exceptions=st.sampled_from([(), (("*.norm", "fp32"), ("head", "fp32"))]),
        tensor=st.integers(1, 64),
        batchnorm=st.sampled_from(["global", "local"]),
        home_optimizer=st.sampled_from(["device", "host", "disk"]),
        allreduce=st.sampled_from(["backend", "ring", "naive"]),
        bucket_bytes=st.integers(1, 2**40),
    )
)
def test_text_parses_back(plan: Plan) -> None:
    assert Plan.parse(str(plan)) == plan


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("data=0", ["'data=0'", "word 1", "1 or more"]),
        ("data=-1", ["'-1'", "1 or more"]),
        ("data=2 tensor=two", ["'tensor=two'", "word 2", "whole number"]),
        ("data=2 data=3", ["data is given twice", "word 2"]),
        ("data", ["cannot read 'data'", "key=value"]),
        ("data=", ["cannot read 'data='"]),
        ("=2", ["cannot read '=2'"]),
        ("dta=2", ["unknown key 'dta'", "did you mean data?"]),
        ("pipline=2", ["unknown key 'pipline'", "did you mean pipeline"]),
        ("xyzzy=2", ["unknown key 'xyzzy'", "the keys are pipeline, replica, data, expert, expert.capacity, tensor"]),
        ("batchnorm=globl", ["'globl'", "global, local"]),
        ("allreduce=tree", ["'tree'", "backend, ring, naive"]),
        ("bucket=25", ["'25'", "MiB"]),
        ("bucket=0MiB", ["1B or more"]),
        ("zero=4", ["'zero=4'", "0 to 3"]),
        ("micro=0", ["'micro=0'", "1 or more"]),
        ("recompute=budget=4", ["'budget=4'", "GiB"]),
        ("recompute=budget=0MiB", ["'budget=0MiB'", "1B or more"]),
        ("precision=f8", ["'f8'", "fp32, bf16, fp16"]),
        ("precision.head=bf16 precision.head=fp32", ["precision.head is given twice", "word 2"]),
        ("schedule=foo", ["bad value 'foo' in 'schedule=foo'", "gpipe, 1f1b"]),
        ("home.optimizer=ssd", ["'ssd'", "device, host, disk"]),
        ("zero=2 central=host", ["central=host does not go with zero=2", "leave zero= out"]),
        (
            "central=host home.parameters=disk",
            ["central=host does not go with home.parameters=disk", "=host, or leave"],
        ),
        ("central=disk", ["'central=disk'", "none, host"]),
        ("home.optimiser=disk", ["unknown key 'home.optimiser'", "did you mean home.optimizer"]),
    ],
)
def test_refuses_with_word_and_place(text: str, parts: list[str]) -> None:
    with pytest.raises(PlanError) as error:
        Plan.parse(text)
    for part in parts:
        assert part in str(error.value)


@pytest.mark.parametrize(
    ("text", "within"),
    [
        ("data=4 sync=8 moments=averaged", ""),
        ("data=4 sync=2..64 outer=nesterov outer.lr=0.5 outer.momentum=0.8 streaming=2 overlap=1", ""),
        ("data=2 tensor=2 sync=32 outer=sgd compress=int4", "tensor=2"),
        ("replica=2 data=2 zero=3 sync=8", "data=2 zero=3"),
        ("data=4 compress=topk:0.01 compress.*.bias=none", ""),
        ("data=4 compress=powersgd:2", ""),
        ("tensor=2 workers=4 servers=2 staleness=0 backup=1", "tensor=2"),
    ],
)
def test_what_each_replica_or_worker_trains_by(text: str, within: str) -> None:
    plan = Plan.parse(text)
    assert Plan.parse(str(plan)) == plan
    assert str(plan.inner_plan) == within


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("data=2 sync=0", "a number of steps, 1 or more, or one that grows like 4..64"),
        ("data=2 sync=8..4", "begins with the smaller number"),
        ("sync=8", "sync=8 is for several replicas, and the plan has one; add data=N"),
        ("compress=int8", "compress=int8 is for several replicas, and the plan has one"),
        ("data=2 staleness=3", "staleness=3 configures parameter servers, and the plan has no workers"),
        ("data=2 outer=sgd", "outer=sgd is for replicas that synchronise every N steps, but these do at every step"),
        ("data=2 sync=8 zero=1", "sync=8 does not go with zero=1 over the same ranks"),
        ("data=2 sync=8 central=host", "sync=8 does not go with central=host over the same ranks"),
        ("data=2 sync=8 streaming=2", "streaming=2 needs an outer optimizer"),
        ("data=2 sync=8 outer.lr=0.5", "outer.lr=0.5 configures an outer optimizer, and the plan has none"),
        ("pipeline=[1,2", "or the number of ranks of each stage like [1,2,1]"),
        ("data=2 sync=8 outer=sgd streaming=9", "streaming=9 parts cannot each have a step of their own"),
        ("data=2 sync=8 outer=sgd overlap=8", "an exchange over overlap=8 steps does not end before the next"),
        ("data=2 sync=8 home.parameters=disk", "replicas exchange what is in memory"),
        ("data=2 compress.*.bias=none", "names an exception, and the plan compresses nothing"),
        ("data=2 compress=topk:2", "more than 0 and at most 1"),
        ("data=2 compress=int3", "it is one of none, bf16, fp8, int8, int4, topk:FRACTION"),
        ("workers=2", "train against parameter servers, and the plan has none; add servers=1"),
        ("workers=2 servers=1 sync=4", "sync=4 with workers=2 takes the mean"),
        ("workers=2 servers=1 backup=1", "add staleness=0"),
        ("workers=2 servers=1 staleness=0 backup=2", "leaves none of workers=2 to wait for"),
    ],
)
def test_exchanges_that_make_no_sense(text: str, message: str) -> None:
    with pytest.raises(PlanError, match=re.escape(message)):
        Plan.parse(text)


def test_the_ranks_of_experts_are_ranks_of_data() -> None:
    plan = Plan.parse("data=4 expert=2 tensor=2")
    assert plan.mesh.spread == "data=2 expert=2 tensor=2" and plan.num_processes == 8 and plan.num_batch_parts == 4
    assert str(Plan.parse("expert=2")) == "data=2 expert=2" and Plan(expert=2) == Plan(data=2, expert=2)
    assert plan.mesh.groups("expert")[0] == (0, 2)
    with pytest.raises(PlanError, match=r"expert=4 does not divide data=6.*such as data=8"):
        Plan.parse("data=6 expert=4")


def test_direct_values_are_checked() -> None:
    with pytest.raises(PlanError, match="data=0"):
        Plan(data=0)


def test_processes() -> None:
    Plan.parse("data=2 tensor=2").check_processes(4)
    with pytest.raises(PlanError, match=r"'data=2 tensor=2' is for data=2 x tensor=2 = 4 processes, not 3") as error:
        Plan.parse("data=2 tensor=2").check_processes(3)
    assert "--processes 4" in str(error.value) and "data=3" in str(error.value)
    with pytest.raises(PlanError, match="'one device' is for 1 process, not 2"):
        Plan().check_processes(2)
    assert Plan.for_processes(3) == Plan(data=3)
