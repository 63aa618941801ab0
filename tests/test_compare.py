"""plait compare: what runs reach and spend, against the first of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from metrics_file import read_metrics

from plait.api.job.metrics import MetricsLog
from plait.api.job.report_command import compare_runs
from plait.cost.efficiency import Curve, compare_curves, smoothed
from plait.errors import DataError
from plait.report.comparison import names_in_figures


def curve(name: str, losses: list[float], tokens: float, seconds: float, sent: float, waited: float = 0.0) -> Curve:
    steps = range(1, len(losses) + 1)
    spent = (tuple(each * step for step in steps) for each in (tokens, seconds, sent))
    return Curve(name, tuple(losses), *spent, waited)


def test_efficiency_throughput_and_goodput_to_the_loss_that_all_reach() -> None:
    one = curve("one", [5.0, 4.0, 3.0, 2.0], 100, 2.0, 1000)
    other = curve("other", [5.0, 4.5, 4.0, 3.5, 3.0], 100, 1.0, 10, waited=1.0)
    target, (first, second) = compare_curves([one, other])
    assert target == 3.0
    assert (first.efficiency, first.throughput, first.goodput, first.seconds, first.num_bytes) == (1, 50, 50, 6, 3000)
    assert (second.efficiency, second.throughput, second.seconds) == (pytest.approx(0.6), 100, 5)
    assert second.goodput == pytest.approx(60) and second.waited == pytest.approx(0.2)
    assert one.reaches(3.5) == (250, 5, 2500) and one.reaches(1.0) is None and one.reaches(9.0) == (100, 2, 1000)


def test_smoothed_is_the_mean_of_the_last_few() -> None:
    found = smoothed(range(1, 41), [float(n) for n in range(40)])
    assert found[0] == 0 and found[3] == 1.5 and found[-1] == pytest.approx(29.5)
    a_line_a_round = smoothed(range(8, 80, 8), [float(n) for n in range(9)])
    assert a_line_a_round[-1] == pytest.approx(7), "those of steps 53 to 72"


def write(folder: Path, losses: list[float], **more: object) -> Path:
    folder.mkdir()
    lines = [
        {"step": i, "loss": loss, "tokens_per_s": 10.0, "seconds": 2.0, "sent_bytes": 5, **more}
        for i, loss in enumerate(losses, 1)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_a_table_and_a_page_of_runs(tmp_path: Path) -> None:
    runs = [
        write(tmp_path / "a", [4.0, 3.0, 2.0]),
        write(tmp_path / "b", [4.0, 3.5, 3.0], agree_seconds=0.5, staleness={"0": 3, "2": 1}),
    ]
    text = compare_runs(runs, tmp_path / "page.html")
    lines = text.splitlines()
    assert lines[0].split()[:3] == ["run", "plan", "statistical"]
    assert "0.67" in lines[2] or "0.6" in lines[2]
    assert "25.0%" in lines[2] and "training loss, smoothed of 3.5" in text
    page = (tmp_path / "page.html").read_text()
    assert "versions old" in page and len(page) > 1 << 20


def test_runs_of_one_plan_are_told_apart_by_their_folders(tmp_path: Path) -> None:
    curves = [Curve(name, (1.0,), (1.0,), (1.0,), (1.0,), 0.0) for name in "abc"]
    assert names_in_figures(curves, ["data=2", "data=2", ""]) == ["data=2 (a)", "data=2 (b)", "c"]
    runs = [write(tmp_path / name, [4.0, 3.0]) for name in "ab"]
    compare_runs(runs, tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text().replace("\\u002f", "/")
    assert f'"name":"one device ({runs[0]})"' in page


def test_a_run_that_went_on_under_another_plan(tmp_path: Path) -> None:
    runs = [tmp_path / "a", tmp_path / "b"]
    for run in runs:
        run.mkdir()
    for first, plan in ((1, "workers=2 servers=1"), (3, "workers=2 servers=1"), (5, "data=2")):
        for run in runs:
            log = MetricsLog(run, first, plan=plan if run.name == "a" else "data=2")
            for step in range(first, first + 4):
                log.write({"step": step, "loss": 9.0 - step, "tokens_per_s": 10.0, "seconds": 2.0})
            log.close()
    assert [line.get("plan") for line in read_metrics(runs[0] / "metrics.jsonl")][::2] == [
        "workers=2 servers=1", "workers=2 servers=1", "data=2", None,
    ]  # fmt: skip
    assert "workers=2 servers=1 (from step 1), then data=2 (from step 5)" in compare_runs(runs, None)


def test_folders_that_are_no_runs(tmp_path: Path) -> None:
    run = write(tmp_path / "a", [4.0])
    with pytest.raises(DataError, match="needs two runs or more"):
        compare_runs([run], None)
    with pytest.raises(DataError, match="nowhere' has no metrics.jsonl with a step in it"):
        compare_runs([run, tmp_path / "nowhere"], None)
