"""plait report and plait compare: the files in runs' folders, as HTML pages, a table, and a trace for Perfetto."""

from __future__ import annotations

import functools
import operator
import statistics
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

from plait.api.job.metrics import METRICS, noise_of, read_steps
from plait.cost.efficiency import Curve, compare_curves, smoothed
from plait.cost.predict import measure_costs, predict, with_held
from plait.engine.trace_folder import PLAN, TRACE, Recorded, RunPlan, read_plan, read_trace
from plait.errors import DataError
from plait.report.comparison import comparison_page, comparison_table
from plait.report.perfetto import chrome_trace
from plait.report.run_page import StepView, build_page, steps_that_fit
from plait.report.swimlane import write_page
from plait.spec.trace import NEXT_BATCH, Trace, flattened


def write_report(run: Path, out: Path, perfetto: Path | None = None) -> str:
    """Write the page, and with `perfetto` the trace. Returns a message for the user.

    Raises DataError for a folder that is no run, for a damaged file, and for a `perfetto` without a trace to write.
    """
    if not run.is_dir():
        what = "is a file" if run.exists() else "does not exist"
        raise DataError(f"{str(run)!r} {what}; name the folder of a run, which is the train.out of its job")
    plan, metrics = read_plan(run), read_steps(run / METRICS)
    if plan is None and not metrics:
        raise DataError(
            f"{str(run)!r} is no run: it has neither {PLAN} nor {METRICS}; name the folder that `plait train` wrote"
            " into, its train.out, or that of Trainer(trace=...)"
        )
    recorded = read_trace(run, plan.mesh) if plan is not None else []
    predicted = None if plan is None else _predicted(plan, recorded)
    if perfetto is not None:
        if not recorded and predicted is None:
            raise DataError(f"{run / TRACE} has no trace to write to {str(perfetto)!r}; train with --trace")
        write_page(perfetto, chrome_trace([(each.step, each.begin, each.trace) for each in recorded], predicted))
    steps = [_view(plan, each, predicted) for each in recorded] if plan is not None else []
    if not steps and predicted is not None:
        steps = [StepView(0, None, predicted)]
    shown = steps_that_fit(steps)
    page = build_page(f"plait: {run}", _facts(plan, recorded, shown, predicted, metrics), shown, metrics)
    write_page(out, page)
    more = f"; open {perfetto} at ui.perfetto.dev" if perfetto is not None else ""
    return f"wrote {out}{more}"


def _predicted(plan: RunPlan, recorded: list[Recorded]) -> Trace | None:
    """The simulated step, with measured costs or else estimated ones; None without a pipeline."""
    if plan.schedule is None or plan.costs is None:
        return None
    traces = [each.trace for each in recorded]
    if not traces:
        return predict(plan.schedule, plan.edges, plan.costs, plan.places())
    costs = measure_costs(traces, plan.schedule, plan.edges, plan.places(), plan.pipeline_of, plan.costs)
    before = [min((s.start for s in trace.spans if s.kind != NEXT_BATCH), default=0.0) for trace in traces]
    return predict(plan.schedule, plan.edges, costs, plan.places(), statistics.median(before))


def _view(plan: RunPlan, recorded: Recorded, predicted: Trace | None) -> StepView:
    trace, memory_of = recorded.trace, recorded.memory_of
    if plan.schedule is not None and plan.costs is not None:
        held = with_held(trace, plan.schedule, plan.costs, plan.places())
        if memory_of == "resident":  # a process keeps what it has freed, so this says little
            memory_of = "held"
        else:
            held = replace(held, memory=trace.memory)
        trace = held
    return StepView(recorded.step, flattened(trace), predicted, recorded.sent, memory_of, recorded.experts)


def _loads(recorded: list[Recorded]) -> list[str]:
    """A line for each mixture of experts, over all steps of the trace."""
    found = []
    for module in recorded[-1].experts if recorded else ():
        load = functools.reduce(operator.add, (step.experts[module] for step in recorded))
        text = f"{module}: the fullest of {len(load.rows)} gets {max(load.relative):.2f} times the rows of the mean"
        total = sum(load.rows)
        lost = f"{load.dropped:,} of {total:,} rows dropped ({load.dropped / total:.2%})" if load.dropped else ""
        found.append(f"{text}; {lost or 'no row dropped'}")
    return found


def _facts(
    plan: RunPlan | None,
    recorded: list[Recorded],
    shown: list[StepView],
    predicted: Trace | None,
    metrics: list[dict[str, Any]],
) -> list[tuple[str, str]]:
    found = []
    served = any("workers" in line for line in metrics)  # by workers of parameter servers, which are no ranks
    if plan is not None:
        ranks = f" ({plan.num_ranks} rank{'s' * (plan.num_ranks > 1)})"
        found.append(("plan", (plan.plan or "one rank") + ("" if served else ranks)))
    if metrics:
        last = metrics[-1]
        speed = statistics.median(line["tokens_per_s"] for line in metrics)
        found.append(("training", f"{last['step']} steps, last loss {last['loss']:.4g}, median {speed:,.0f} tokens/s"))
    if any("noise_signal" in line for line in metrics):
        noise = noise_of(metrics)
        text = "not shown yet by the steps that measured it" if noise is None else str(noise)
        found.append(("gradient noise scale", text))
    seconds = [step.measured.seconds for step in shown if step.measured is not None]
    if recorded and seconds:
        first, last_step = recorded[0].step, recorded[-1].step
        text = f"steps {first} to {last_step}"
        if len(shown) < len(recorded):
            text += f", of which the last {len(shown)} are in this page"
        found.append(("trace", f"{text}; median step {statistics.median(seconds) * 1e3:.4g} ms"))
    found += [("experts", line) for line in _loads(recorded)]
    if predicted is not None and seconds:
        ratio = statistics.median(seconds) / predicted.seconds - 1
        found.append((
            "predicted",
            f"{predicted.seconds * 1e3:.4g} ms by the simulator, with the median cost of each stage and transfer of"
            f" these steps; the measured step takes {abs(ratio):.1%} {'more' if ratio >= 0 else 'less'}",
        ))  # fmt: skip
    elif predicted is not None:
        found.append((
            "predicted",
            "by the simulator, with costs estimated from the graph, of which only ratios are meant; train with --trace"
            " to see what was done",
        ))  # fmt: skip
    elif not recorded:
        how = "runs with parameter servers record none" if served else "train with --trace to see what each rank did"
        found.append(("trace", f"none; {how}"))
    return found


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


def _lines(run: Path) -> list[dict[str, object]]:
    found = read_steps(run / METRICS)
    if not found:
        raise DataError(f"{str(run)!r} has no {METRICS} with a step in it; name the folders of runs, their train.out")
    return found


def _plans(run: Path, lines: Sequence[dict[str, object]]) -> str:
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
