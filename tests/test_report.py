"""Traces of runs: what ranks record, the costs that are measured from it, and the page that plait report writes."""

from __future__ import annotations

import functools
import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from plait.api.cli import app
from plait.api.trainer import Trainer
from plait.backends.recorder import NUM_STEPS
from plait.comm.thread_world import run_ranks
from plait.comm.traced_comm import TracedComm, clock_offset
from plait.cost.costs import Costs
from plait.cost.predict import measure_costs, predict, with_held
from plait.cost.simulate import simulate
from plait.engine.compiler import Captures, Compiler
from plait.engine.trace_folder import RunPlan, read_plan, read_trace
from plait.plan.plan import Plan
from plait.report.run_page import MOST_SPANS, StepView, build_page, steps_that_fit
from plait.schedule.families import make_schedule
from plait.schedule.readiness import chain
from plait.schedule.transfers import add_transfers, add_updates
from plait.spec.mesh import Mesh
from plait.spec.schedule import Schedule
from plait.spec.trace import COMPUTE_KINDS, Span, Trace, flattened

SMALL = """
[model]
layers = 2
width = 16
heads = 2
sequence = 16
[data]
source = "text.txt"
[optimizer]
lr = 1e-2
[train]
steps = 3
batch_size = 4
out = "run"
[sample]
length = 0
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("RANK", "WORLD_SIZE", "PLAIT_PLAN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.toml").write_text(SMALL)
    (tmp_path / "text.txt").write_text("The quick brown fox jumps over the lazy dog while it rains. " * 20)
    return tmp_path


def command(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 0, result.output
    return result.output


def refused(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 2, result.output
    return " ".join(result.output.split())


def train(plan: str, out: Path | None, steps: int = 2) -> tuple[list[float], list[str]]:
    """Losses of a small model under a plan, with ranks as threads, and the kinds of Comm afterwards."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))
    batch = {"x": torch.randn(8, 8), "y": torch.randn(8, 4)}

    def loss_fn(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return nn.functional.mse_loss(model(batch["x"]), batch["y"])

    chosen = Plan.parse(plan)
    compiler = Compiler(Captures(model, loss_fn), chosen)

    def rank(world: object) -> tuple[list[float], list[str]]:
        sgd = functools.partial(torch.optim.SGD, lr=0.1)
        trainer = Trainer(model, loss_fn, sgd, chosen, trace=out, world=world, compiler=compiler)  # type: ignore[arg-type]
        losses = [float(trainer.step(batch)) for _ in range(steps)]
        trainer.evaluate(batch)
        trainer.close()
        comms = [type(trainer.world.comm(axis)).__name__ for axis in chosen.mesh.names]
        return losses, comms

    return run_ranks(chosen.mesh, rank)[0]


def as_recorded(trace: Trace) -> Trace:
    """A simulated trace with the names that the executor gives, whose sends take no time."""
    spans = []
    for span in trace.spans:
        name, end = span.name.removeprefix("wait for "), span.end
        if span.kind == "send":
            name, end = f"SEND:{name}", span.start
        spans.append(Span(span.rank, span.kind, name, span.start, end, span.num_bytes, span.micro, span.chunk))
    return Trace(tuple(spans), trace.num_ranks)


def complete(name: str, num_ranks: int, num_micro: int) -> Schedule:
    bare = make_schedule(name, num_ranks, num_micro, None)
    edges = chain(bare.num_stages)
    return add_updates(add_transfers(bare, edges), edges)


def test_spans_that_nest_are_cut_around_what_is_within() -> None:
    spans = [(0, 10, "backward"), (2, 4, "reduce"), (3, 4, "wait"), (6, 7, "reduce"), (11, 12, "optimizer")]
    trace = Trace(tuple(Span(0, kind, kind, start, end) for start, end, kind in spans), 1)
    found = [(s.start, s.end, s.kind) for s in flattened(trace).spans]
    assert found == [
        (0, 2, "backward"), (2, 3, "reduce"), (3, 4, "wait"), (4, 6, "backward"), (6, 7, "reduce"), (7, 10, "backward"),
        (11, 12, "optimizer"),
    ]  # fmt: skip
    assert flattened(trace).busy(0) == 7


def test_a_span_that_does_not_nest_ends_the_other() -> None:
    trace = Trace((Span(0, "send", "a", 0, 2), Span(0, "backward", "b", 1, 5)), 1)
    assert [(s.name, s.start, s.end) for s in flattened(trace).spans] == [("a", 0, 1), ("b", 1, 5)]


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1", "interleaved"])
def test_costs_measured_from_a_simulated_trace_are_those_it_was_made_with(name: str) -> None:
    schedule = complete(name, 2, 4)
    num, edges = schedule.num_stages, chain(schedule.num_stages)
    given = Costs(
        tuple(1.0 + s for s in range(num)), tuple(2.0 + s for s in range(num)), tuple(0.5 + s for s in range(num)),
        communication=0.125, step=(0.25,) * num,
    )  # fmt: skip
    trace = simulate(schedule, given, edges)
    found = measure_costs([as_recorded(trace)] * 2, schedule, edges, range(2), lambda rank: range(2), given)
    assert found.forward == pytest.approx(given.forward)
    assert found.communication == pytest.approx(given.communication)
    assert found.step == pytest.approx(given.step)
    whole = [b + w for b, w in zip(found.backward, found.weight, strict=True)]
    assert whole == pytest.approx([b + w for b, w in zip(given.backward, given.weight, strict=True)])
    assert predict(schedule, edges, found, range(2)).seconds == pytest.approx(trace.seconds)


def test_a_send_counts_as_part_of_what_made_the_value() -> None:
    schedule = complete("gpipe", 2, 1)
    spans = [
        Span(0, "forward", "F0", 0, 2, 0, 0, 0), Span(0, "send", "SEND:F0>1", 2, 3, 8, 0, 0),
        Span(1, "wait", "F0", 0, 4, 8, 0, 0), Span(1, "forward", "F0", 4, 5, 0, 0, 0),
    ]  # fmt: skip
    found = measure_costs([Trace(tuple(spans), 2)], schedule, chain(2), (0, 1), lambda rank: (0, 1), Costs.equal(2))
    assert found.forward == (3, 1)
    assert found.communication == 1


def test_every_rank_of_a_mesh_is_predicted_at_its_place() -> None:
    schedule = complete("1f1b", 2, 2)
    plan = RunPlan("", (("pipeline", 2), ("data", 2)), schedule, chain(2))
    assert plan.places() == (0, 0, 1, 1)
    assert plan.pipeline_of(3) == (1, 3)
    trace = predict(schedule, chain(2), Costs.equal(2), plan.places(), data=0.5)
    names = [[s.name for s in trace.of_rank(rank) if s.kind in COMPUTE_KINDS] for rank in range(4)]
    assert names[0] == names[1] == ["F0", "F1", "B0", "B1"]
    assert names[2] == names[3] == ["F0", "B0", "F1", "B1"]
    assert all(trace.of_rank(rank)[0].kind == "data" for rank in range(4))
    assert [trace.peak_in_flight(rank) for rank in range(4)] == [2, 2, 1, 1]


def test_what_a_measured_trace_held() -> None:
    schedule = complete("1f1b", 2, 3)
    costs = Costs((1, 1), (1, 1), (1, 1), activation_bytes=(10, 20))
    trace = with_held(as_recorded(simulate(schedule, costs)), schedule, costs, (0, 1))
    assert [trace.peak_bytes(rank) for rank in (0, 1)] == [20, 20]
    assert [trace.peak_in_flight(rank) for rank in (0, 1)] == [2, 1]


def test_ranks_record_every_action_of_a_pipeline(tmp_path: Path) -> None:
    losses, comms = train("pipeline=2 data=2 micro=4 schedule=1f1b", tmp_path, steps=NUM_STEPS + 2)
    assert losses == train("pipeline=2 data=2 micro=4 schedule=1f1b", None, steps=NUM_STEPS + 2)[0]
    assert TracedComm.__name__ not in comms
    plan = read_plan(tmp_path)
    assert plan is not None and plan.schedule is not None and plan.num_ranks == 4
    steps = read_trace(tmp_path, plan.mesh)
    assert [step.step for step in steps] == list(range(3, NUM_STEPS + 3))
    for step in steps:
        for rank, place in enumerate(plan.places()):
            spans = step.trace.of_rank(rank)
            computed = list(dict.fromkeys(s.name for s in sorted(spans, key=lambda s: s.start) if s.micro is not None
                                          and s.kind in COMPUTE_KINDS))  # fmt: skip
            assert computed == [str(a) for a in plan.schedule.ranks[place] if a.computes]
            assert {s.name for s in spans if s.kind == "send"} == {
                str(a) for a in plan.schedule.ranks[place] if a.kind == "SEND"
            }
            assert [s.kind for s in spans].count("optimizer") == 1
            assert any(s.kind == "reduce" and s.name == "all_reduce data" for s in spans)
        assert set(step.sent) >= {(0, 2), (2, 0), (1, 3), (3, 1), (0, 1), (1, 0)}


def test_without_a_pipeline_a_microbatch_is_a_forward_and_a_backward(tmp_path: Path) -> None:
    train("data=2 zero=1 micro=2", tmp_path)
    (first, last) = read_trace(tmp_path, Mesh((("data", 2),)))
    assert (first.step, last.step) == (1, 2)
    for rank in range(2):
        spans = sorted(last.trace.of_rank(rank), key=lambda s: s.start)
        assert [s.name for s in spans if s.kind in COMPUTE_KINDS] == ["F0", "B0", "F1", "B1"]
        backward = next(s for s in spans if s.name == "B1")
        inside = [s for s in spans if backward.start <= s.start and s.end <= backward.end and s is not backward]
        assert {s.kind for s in inside} == {"reduce"}
        assert any(s.kind == "gather" for s in spans)


def test_a_shorter_trace_leaves_nothing_of_a_longer_one(tmp_path: Path) -> None:
    train("data=4", tmp_path)
    train("data=2", tmp_path)
    assert sorted(path.name for path in (tmp_path / "trace").iterdir()) == ["rank-0.json", "rank-1.json"]


def test_clocks_of_hosts_are_brought_to_one_time() -> None:
    second = 10**9

    def offset(world: object) -> int:
        rank = world.rank  # type: ignore[attr-defined]
        clock = lambda: time.perf_counter_ns() + (rank // 2) * 1000 * second  # noqa: E731
        return clock_offset(world, f"host{rank // 2}", clock)  # type: ignore[arg-type]

    found = run_ranks(Mesh((("data", 4),)), offset)
    assert found[:2] == [0, 0]
    assert found[2:] == pytest.approx([1000 * second] * 2, abs=100 * second)
    assert run_ranks(Mesh((("data", 2),)), lambda world: clock_offset(world)) == [0, 0]


def test_report_of_a_traced_job(folder: Path) -> None:
    command("train", "job.toml", "--trace")
    assert command("report", "run", "--perfetto", "trace.json").startswith("wrote run/report.html")
    page = (folder / "run" / "report.html").read_text()
    assert "http" not in re.sub(r"<script>.*?</script>", "", page, flags=re.DOTALL)
    figures = json.loads(re.search(r'id="step-0">(.*?)</script>', page, re.DOTALL)[1])  # type: ignore[index]
    assert {trace["name"] for trace in figures["swimlanes"]["data"]} == {"data", "forward", "backward", "optimizer"}
    assert "bubble" not in json.dumps(figures)  # no pipeline
    assert '<option value="2"' in page and "loss" in page
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    assert {event["ph"] for event in events} == {"X", "C", "M"}
    assert sum(event["ph"] == "X" and event["name"] == "B0" for event in events) == 3
    assert min(event["ts"] for event in events if event["ph"] == "X") == 0


def test_report_of_a_job_without_a_trace(folder: Path) -> None:
    command("train", "job.toml")
    assert not (folder / "run" / "trace").exists()
    command("report", "run", "--out", "page.html")
    page = (folder / "page.html").read_text()
    assert "train with --trace" in page and 'id="run"' in page and 'id="step-0"' not in page
    assert "no trace to write" in refused("report", "run", "--perfetto", "trace.json")


def test_report_of_a_pipeline_before_and_after_it_is_measured(tmp_path: Path) -> None:
    train("pipeline=2 micro=2", tmp_path)
    command("report", str(tmp_path))
    page = (tmp_path / "report.html").read_text()
    assert "predicted: " in page and "measured: " in page
    for path in (tmp_path / "trace").iterdir():
        path.unlink()
    command("report", str(tmp_path))
    page = (tmp_path / "report.html").read_text()
    assert "predicted: " in page and "measured: " not in page and "estimated from the graph" in page
    assert "2 ranks, 2 microbatches" in command(
        "schedule", "1f1b", "--stages", "2", "--micro", "2", "--costs", str(tmp_path / "costs.json")
    )


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    assert "does not exist; name the folder of a run" in refused("report", str(tmp_path / "none"))
    (tmp_path / "file").touch()
    assert "is a file" in refused("report", str(tmp_path / "file"))
    assert "is no run: it has neither plan.json nor metrics.jsonl" in refused("report", str(tmp_path))
    train("data=2", tmp_path)
    (tmp_path / "trace" / "rank-1.json").write_text("{}")
    assert "rank-1.json is no trace of plait: KeyError" in refused("report", str(tmp_path))
    (tmp_path / "trace" / "rank-1.json").unlink()
    assert "lacks rank-1.json of 2 ranks" in refused("report", str(tmp_path))
    (tmp_path / "plan.json").write_text("[]")
    assert "plan.json cannot be read" in refused("report", str(tmp_path))


def test_many_spans_are_a_few_arrays(folder: Path) -> None:
    schedule = complete("1f1b", 16, 128)
    trace = simulate(schedule, Costs.equal(16), chain(16))
    page = build_page("many", [], [StepView(1, trace, trace)], [])
    figures = json.loads(re.search(r'id="step-0">(.*?)</script>', page, re.DOTALL)[1])  # type: ignore[index]
    assert [row["ranks"] for row in figures["swimlanes"]["rows"]] == [16, 16]
    assert len(figures["swimlanes"]["names"]) < len(trace.spans)  # once each
    assert len(json.dumps(figures)) < 60 * 2 * len(trace.spans)


def test_what_files_of_a_run_say_is_text_on_its_page() -> None:
    bad = "</script><!--<script>alert(1)</script>"
    step: Any = StepView(bad, Trace((Span(0, "forward", bad, 0, 1),), 1), None)  # type: ignore[arg-type]
    page = build_page(bad, [(bad, bad)], [step], [])
    assert "<script>alert" not in page and "</script><!--" not in page
    figures = json.loads(re.search(r'id="step-0">(.*?)</script>', page, re.DOTALL)[1])  # type: ignore[index]
    assert bad in json.dumps(figures)


def test_a_page_holds_the_last_steps_that_fit() -> None:
    spans = tuple(Span(0, "forward", "F0", 0, 1) for _ in range(MOST_SPANS // 2))
    steps = [StepView(number, Trace(spans, 1), None) for number in range(4)]
    assert [step.step for step in steps_that_fit(steps)] == [2, 3]
    assert [step.step for step in steps_that_fit([StepView(9, Trace(spans * 3, 1), None)])] == [9]
