"""plait compare: a comparison of runs, as a table and as a page of curves."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from plait.api.job.metrics import METRICS, read_steps
from plait.cost.efficiency import Curve, compare_curves, smoothed
from plait.engine.trace_folder import read_plan
from plait.errors import DataError
from plait.report.comparison import comparison_page, comparison_table
from plait.report.swimlane import write_page


def compare_runs(runs: Sequence[Path], out: Path | None) -> str:
    """The comparison of runs as a table. With `out` the page is written too. Raises DataError for a folder without a
    run."""
    if len(runs) < 2:
        raise DataError("a comparison needs two runs or more, of which the first is what the others are compared with")
    lines = {run: _lines(run) for run in runs}
    held_out = all(sum("held_out_loss" in line for line in each) > 1 for each in lines.values())
    curves = [_curve(run, each, held_out) for run, each in lines.items()]
    target, found = compare_curves(curves)
    plans = [_plans(run, each) for run, each in lines.items()]
    stale = [_staleness(each) for each in lines.values()]
    which = "held-out loss" if held_out else "training loss, smoothed"
    table = comparison_table(found, plans, target, which)
    if out is not None:
        write_page(out, comparison_page(curves, found, plans, target, which, stale))
        table += f"\nwrote {out}"
    return table


def _lines(run: Path) -> list[dict[str, Any]]:
    found = read_steps(run / METRICS)
    if not found:
        raise DataError(f"{str(run)!r} has no {METRICS} with a step in it; name the folders of runs, their train.out")
    return found


def _plans(run: Path, lines: Sequence[dict[str, Any]]) -> str:
    """The run's plan; if the plan changed when the run was resumed, each plan and its first step."""
    found = [(line["step"], str(line["plan"])) for line in lines if "plan" in line]
    changes = [one for index, one in enumerate(found) if index == 0 or one[1] != found[index - 1][1]]
    if len(changes) > 1:
        return ", then ".join(f"{plan} (from step {step})" for step, plan in changes)
    only = read_plan(run)
    return only.plan if only is not None else ""


def _curve(run: Path, lines: Sequence[dict[str, Any]], held_out: bool) -> Curve:
    def total(values: Sequence[float]) -> list[float]:
        return list(accumulate(values))

    tokens = total([line["tokens_per_s"] * line["seconds"] for line in lines])
    seconds = total([line["seconds"] for line in lines])
    sent = total([line.get("sent_bytes", line.get("bytes_moved", 0)) for line in lines])
    losses = smoothed([line["step"] for line in lines], [line["loss"] for line in lines])
    at = [i for i, line in enumerate(lines) if not held_out or "held_out_loss" in line]
    return Curve(
        str(run),
        tuple(lines[i]["held_out_loss"] if held_out else losses[i] for i in at),
        tuple(tokens[i] for i in at),
        tuple(seconds[i] for i in at),
        tuple(sent[i] for i in at),
        sum(line.get("agree_seconds", line.get("waited_seconds", 0.0)) for line in lines),
    )


def _staleness(lines: Sequence[dict[str, Any]]) -> dict[int, int]:
    """The number of updates by their age in versions, if the run has recorded it."""
    found: dict[int, int] = {}
    for line in lines:
        for age, count in (line.get("staleness") or {}).items():
            found[int(age)] = found.get(int(age), 0) + int(count)
    return found
