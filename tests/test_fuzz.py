"""The fuzzer: what it draws runs; what it finds is told apart, made smaller and written down; some of its cases."""

from __future__ import annotations

import random
import runpy
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from comm_worlds import forkserver
from fuzz import grammar, plans, texts
from fuzz.grammar import Layer, Spec, block
from fuzz.outcome import Checker, Outcome, classify, without_values
from fuzz.run import Counted, model_of, plan_of
from fuzz.script import render
from fuzz.shrink import shrink
from fuzz.worker import Worker

from plait.errors import BatchError, PlanError, RankFailed
from plait.plan.plan import Plan, plan_keys
from plait.reference.one_device import one_device_loss

TABLES = {"floats": grammar.SEQUENCE, "image": grammar.IMAGE, "vector": grammar.VECTOR, "video": grammar.VIDEO}
ROWS = [(source, name, options) for source, table in TABLES.items() for _, name, options in table]
PLAIN = Spec("floats", 4, 4, 8, 4, (), "regress")
MLP = Layer("MLP", (("inner", 8), ("activation", "relu"), ("gate", "none"), ("bias", True), ("dropout", 0.0)))


@pytest.mark.parametrize(("source", "name", "options"), ROWS, ids=[f"{source}-{name}" for source, name, _ in ROWS])
def test_every_layer_runs_in_plain_pytorch(source: str, name: str, options: grammar.Options) -> None:
    rng = random.Random(name)
    shape = Spec(source, 4, 4, 8, 4, (), "regress").shape
    for _ in range(6):
        layer = Layer(name, tuple(options(rng, shape).items()))
        spec = replace(PLAIN, source=source, layers=(layer,))
        assert grammar.runs(spec), layer
        made = grammar.make(spec)
        assert made.model.layers[0].out_shape == block(name)(shape, **dict(layer.options)).out_shape


@pytest.mark.parametrize("channels_last", [False, True])
def test_volumes_in_half_precision_read_no_memory_that_is_undefined(channels_last: bool) -> None:
    conv = {"out": 8, "kernel": 3, "stride": 1, "groups": 1, "mode": "zeros", "norm": "none"}
    layers = tuple(Layer("Conv3d", tuple({**conv, "apart": apart}.items())) for apart in (False, True))
    spec = replace(PLAIN, source="video", length=2, layers=layers, dtype="bfloat16", channels_last=channels_last)
    made = grammar.make(spec)
    total = one_device_loss(made.model, made.loss_fn, made.batch).total
    for size in range(128, 4096, 64):  # so that what is taken next is nan
        _ = [torch.full((size,), torch.nan, dtype=torch.bfloat16) for _ in range(16)]
    total.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in made.model.parameters())


def test_a_seed_gives_the_same_cases() -> None:
    drawn, again = ([(spec := model_of(3, n), plan_of(3, n, spec)) for n in range(0, 40, 8)] for _ in range(2))
    assert drawn == again
    assert len(set(drawn)) == 5
    one, other = (grammar.make(drawn[0][0]) for _ in range(2))
    for here, there in zip(one.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(here, there)


def test_plans_have_every_key_and_are_mostly_legal() -> None:
    keys: Counter[str] = Counter()
    refused = 0
    rng = random.Random(0)
    for _ in range(3000):
        text = plans.draw(rng, replace(PLAIN, rows=12))
        try:
            plan = Plan.parse(texts.split(text)[0])
        except PlanError:
            refused += 1
            continue
        assert plan.inner_plan.num_processes <= 12, text
        keys.update(key.name for key in plan_keys() if getattr(plan, key.field) != key.default)
    every = {key.name for key in plan_keys()} - {"backend"}  # XLA's devices are there from a process's start
    assert every - keys.keys() == set()
    assert refused < 300


def test_a_case_is_made_smaller_as_long_as_it_fails_alike() -> None:
    def check(spec: Spec, plan: str) -> Outcome:
        if not any(layer.name == "MLP" for layer in spec.layers):
            return Outcome("verified")
        return Outcome("wrong", "loss" if "zero" in plan else "buffers") if "data=" in plan else Outcome("refused")

    spec = replace(
        PLAIN, rows=8, width=16, dtype="float32", clip_norm=0.1, layers=(replace(MLP, how="residual"), MLP, MLP)
    )
    plan = "pipeline=2 data=4 micro=2 zero=3"
    small, text, found = shrink(spec, plan, check(spec, plan), check)
    assert text == "data=2" and found.kind == "wrong"
    assert small == replace(PLAIN, length=2, layers=small.layers) and [layer.name for layer in small.layers] == ["MLP"]


@pytest.mark.filterwarnings("ignore:plait has no rule")
def test_a_case_as_a_script_stands_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = {"heads": 2, "kv_heads": 1, "qkv": "grouped", "positions": "complex", "mask": "both", "product": "sdpa",
               "dropout": 0.0, "bias": True, "norm": True}  # fmt: skip
    spec = replace(PLAIN, layers=(Layer("Attention", tuple(options.items())),))
    text = render(spec, "data=2", Outcome("wrong", "loss"), "scripts/fuzz --seed 1 --case 2")
    assert "import fuzz" not in text and "from fuzz" not in text
    path = tmp_path / "case.py"
    path.write_text(text)
    runpy.run_path(str(path))
    assert "scripts/fuzz --seed 1 --case 2" in text and "plan             data=2" in capsys.readouterr().out


def test_failures_are_told_apart() -> None:
    def raised(error: Exception, cause: Exception | None = None) -> Exception:
        try:
            raise error from cause
        except Exception as found:
            return found

    assert classify(raised(BatchError("data=3 does not divide 8"))).kind == "refused"
    assert classify(raised(RuntimeError("shape"))).kind == "crashed"
    assert classify(raised(RankFailed(0, "x"), PlanError("not at all"))).kind == "late"
    assert classify(raised(RankFailed(0, "x"), KeyError("x"))).kind == "crashed"
    assert without_values("data=3 does not divide layers.0.weight: (8, 3)") == "data=N does not divide NAME: ()"


def test_a_run_says_what_it_found() -> None:
    counted = Counted()
    assert counted.add(0, Outcome("wrong", "loss")) and not counted.add(1, Outcome("wrong", "loss"))
    counted.add(2, Outcome("refused", "PlanError: no"))
    counted.add(3, Outcome("verified", seconds=1000.0))
    said = counted.show(7, 12.0)
    assert "seed 7: 4 cases in 12 s: 1 verified, 1 refused, 2 wrong, 0 crashed, 0 late, 0 hung, 1 slow [3]" in said
    assert counted.num_faults == 2 and "2 wrong: loss" in said and "1 refused: PlanError: no" in said


def test_a_child_that_dies_is_replaced() -> None:
    worker = Worker(limit=60.0, context=forkserver())
    try:
        worker._start()
        worker._process.kill()  # before it is asked anything
        worker._process.join()
        found = worker.check(PLAIN, ["micro=2", "pipeline=2 micro=2", "micro=2"])
        assert next(found).kind == "verified"
        worker._process.kill()  # it may have sent some more before
        rest = [outcome.kind for outcome in found]
        assert len(rest) == 2 and rest[1] == "verified" and rest[0] in ("crashed", "verified")
    finally:
        worker.close()


@pytest.mark.filterwarnings("ignore")
def test_a_few_cases() -> None:
    counts: Counter[str] = Counter()
    for case in (8, 16):
        spec = model_of(0, case)
        checker = Checker(spec)
        for number in range(case, case + 3):
            found = checker.check(plan_of(0, number, spec))
            assert found.kind in ("verified", "refused"), f"{spec}\n{plan_of(0, number, spec)}\n{found.detail}"
            counts[found.kind] += 1
    assert counts["verified"] >= 2
