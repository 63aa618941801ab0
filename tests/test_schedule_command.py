"""plait schedule: what it draws and says, its page, and what it refuses."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from plait.api.cli import app
from plait.compile.stages.split import schedule_of
from plait.cost.costs import Costs
from plait.cost.simulate import simulate
from plait.errors import PlanError
from plait.plan.plan import Plan
from plait.report.charts import draw_utilisation
from plait.report.schedule_page import describe_schedule, find_schedule
from plait.report.swimlane import COLOURS, draw_swimlanes, page
from plait.schedule.families import make_schedule
from plait.spec.schedule import Schedule
from plait.spec.trace import KINDS, Span, Trace


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["schedule", *arguments])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_a_schedule_by_name() -> None:
    found = run("1f1b", "--stages", "4", "--micro", "8")
    assert found.splitlines()[0].startswith("rank 0 | F0 F1 F2 F3  .  .  .  .  .  . B0 == F4 B1 ==")
    assert "1f1b: 4 ranks, 8 microbatches; forward, and each part of backward, takes 1" in found
    assert "utilisation 72.7%, bubble 27.3%" in found
    assert [line.split()[-1] for line in found.splitlines() if re.match(r"\d ", line)] == ["4", "3", "2", "1"]


def test_a_searched_schedule_is_saved_for_a_plan(tmp_path: Path) -> None:
    """For given times it leaves a fifth of zb-h2's bubble, within twice the memory of 1f1b."""
    costs = {"forward": 18.5, "backward": 18.1, "weight": 9.3, "communication": 0.6}
    costs |= {"activation_bytes": 87, "weight_activation_bytes": 32}
    (tmp_path / "costs.json").write_text(json.dumps(costs))
    sizes = ["--stages", "4", "--micro", "12", "--costs", str(tmp_path / "costs.json")]
    file = tmp_path / "searched.txt"
    found = run("zb-search", *sizes, "--save", str(file))
    bubbles = [float(re.search(r"bubble ([\d.]+)%", text)[1]) for text in (found, run("zb-h2", *sizes))]  # type: ignore[index]
    assert bubbles[0] < bubbles[1] / 4
    assert run(str(file), *sizes) == found
    plan = Plan.parse(f"pipeline=4 micro=12 schedule={file}")
    assert schedule_of(plan).ranks == Schedule.parse(file.read_text()).ranks
    lacking = CliRunner().invoke(app, ["schedule", "zb-search", "--stages", "4", "--micro", "12"])
    assert lacking.exit_code == 2
    nowhere = CliRunner().invoke(app, ["schedule", "1f1b", *sizes, "--save", str(tmp_path / "no" / "file")])
    assert nowhere.exit_code == 2


def test_chunks_and_costs(tmp_path: Path) -> None:
    costs = {"forward": [1, 2, 1, 1], "backward": 1, "weight": 1, "activation_bytes": 2**20, "state_bytes": 2**30}
    (tmp_path / "costs.json").write_text(json.dumps(costs))
    found = run(
        "interleaved", "--stages", "2", "--micro", "3", "--chunks", "2", "--costs", str(tmp_path / "costs.json")
    )
    assert "2 ranks, 4 stages, 3 microbatches; costs from" in found
    assert re.search(r"^0 +0,2 .* 5 +2.0 GiB$", found, re.MULTILINE)


def test_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.txt"
    path.write_text("# two at once\nname=mine micro=2 stages=0|1\n0: F0 F1 B0 B1\n1: F0 B0 F1 B1\n")
    assert "mine: 2 ranks, 2 microbatches" in run(str(path))
    assert run(str(path), "--stages", "2", "--micro", "2") == run(str(path))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["1f1", "--stages", "4", "--micro", "8"], "there is no schedule '1f1'; did you mean 1f1b?"),
        (["1f1"], "nor is there a file '1f1' here"),
        (["1f1b", "--stages", "4"], "give --micro"),
        (["1f1b"], "give --stages and --micro"),
        (["mine.txt", "--micro", "3"], "--micro 3, but the file 'mine.txt' is for 2"),
        (["stuck.txt"], "stuck.txt: the schedule mine cannot run: deadlock: rank 0 stands before B0"),
        (["stuck.txt"], "rank 0 |   F0 [B0]    ."),
        (["odd.txt"], "odd.txt: line 2: cannot read 'X0'"),
        (["1f1b", "--stages", "2", "--micro", "2", "--costs", "none.json"], "cannot read the costs 'none.json'"),
        (["1f1b", "--stages", "2", "--micro", "2", "--html", "no/where.html"], "cannot write 'no/where.html'"),
    ],
)
def test_what_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.txt").write_text("name=mine micro=2\n0: F0 F1 B0 B1\n1: F0 B0 F1 B1\n")
    (tmp_path / "stuck.txt").write_text("name=mine micro=2\n0: F0 B0 F1 B1\n1: F0 F1 B0 B1\n")
    (tmp_path / "odd.txt").write_text("name=mine micro=2\n0: F0 X0\n")
    result = CliRunner().invoke(app, ["schedule", *arguments])
    assert result.exit_code == 2
    assert message in result.stderr


def test_what_would_take_minutes_is_refused() -> None:
    with pytest.raises(PlanError, match="4,000,000 cells at most"):
        find_schedule("gpipe", 100_000, 100_000, None)
    with pytest.raises(PlanError, match="500,000 pairs at most"):
        make_schedule("interleaved", 2, 2, 10**9)


def test_it_needs_no_torch() -> None:
    code = (
        "import sys; from plait.api.cli import app\n"
        "try: app(['schedule', 'zb-v', '--stages', '2', '--micro', '3'])\n"
        "except SystemExit as end: sys.exit(end.code or 'torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


def test_a_wide_grid_is_folded() -> None:
    schedule = make_schedule("gpipe", 2, 9)
    found = describe_schedule(schedule, simulate(schedule, Costs.equal(2)), None, 50)
    grid = found.partition("\n\ngpipe:")[0].split("\n\n")
    assert len(grid) == 3 and all(len(line) <= 50 for block in grid for line in block.splitlines())
    whole = describe_schedule(schedule, simulate(schedule, Costs.equal(2)), None).splitlines()[0]
    assert "".join(block.splitlines()[0].removeprefix("rank 0 |") for block in grid) == whole.removeprefix("rank 0 |")


def test_a_page_is_self_contained(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    run("zb-h1", "--stages", "2", "--micro", "3", "--html", str(path))
    text = path.read_text()
    assert text.startswith("<!doctype html>") and "<title>zb-h1, 2 ranks, 3 microbatches</title>" in text
    assert not re.search(r"<(script|link)[^>]+(src|href)=", text)


def test_without_plotly_a_page_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "plotly.graph_objects", None)
    result = CliRunner().invoke(app, ["schedule", "1f1b", "--stages", "2", "--micro", "3", "--html", "page.html"])
    assert result.exit_code == 2
    assert "pip install 'plait[report]'" in result.stderr


def test_swimlanes_have_every_span_predicted_above_measured() -> None:
    predicted = simulate(make_schedule("1f1b", 3, 4), Costs.equal(3, communication=0.5))
    measured = Trace((*predicted.shifted(100).spans, Span(1, "data", "batch", 100, 100.5)), 3)
    figure = draw_swimlanes(measured, predicted)
    assert sum(len(bars.x) for bars in figure.data) == len(predicted.spans) + len(measured.spans)
    assert [note.text.split(":")[0] for note in figure.layout.annotations] == ["predicted", "measured"]
    assert min(min(bars.base) for bars in figure.data) == 0  # each from its own start
    named = [bars.name for bars in figure.data if bars.showlegend]
    assert sorted(named) == sorted(set(named)) and "data" in named
    assert set(COLOURS) == set(KINDS)


def test_units_and_bubbles_are_said_only_where_there_are_some() -> None:
    trace = simulate(make_schedule("1f1b", 2, 3), Costs.equal(2))
    abstract = draw_swimlanes(predicted=trace, unit="units")
    title = abstract.layout.annotations[0].text
    assert " units, utilisation" in title and ", bubble " in title
    assert "units" in [axis.title.text for axis in abstract.select_xaxes()]
    plain = draw_swimlanes(trace, bubble=False)
    assert " s, utilisation" in plain.layout.annotations[0].text and "bubble" not in plain.layout.annotations[0].text
    assert len(draw_utilisation(trace, None, bubble=False).layout.annotations) == 1
    assert len(draw_utilisation(trace, trace).layout.annotations) == 2


def test_many_spans_are_few_lines() -> None:
    spans = tuple(Span(i % 64, "forward", f"F{i}", i, i + 1) for i in range(5000))
    figure = draw_swimlanes(Trace(spans, 64))
    assert [(line.type, len(line.x)) for line in figure.data] == [("scattergl", 15000)]
    assert page([figure], "a & b").count("<title>a &amp; b</title>") == 1
