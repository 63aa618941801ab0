"""The text and the page of `plait simulate`: what a step takes, and of what."""

from __future__ import annotations

from pathlib import Path

from plait.cost.memory_model import human_bytes
from plait.cost.transformer_simulation import SimulatedStep


def describe_step(step: SimulatedStep) -> str:
    """A table of the step's time, memory and bytes sent."""
    found, device = step.estimate, step.cluster.device
    ranks = step.plan.num_processes
    lines = [f"plan {step.plan.title} on {ranks} of {step.cluster.name}: {step.cluster.num_devices} x {device.name}"]
    lines.append(f"{step.rows} sequences, {step.tokens} tokens a step, products in {step.dtype}")
    lines += ["", f"step            {_seconds(step.seconds)}", f"tokens/s        {step.tokens_per_second:,.0f}"]
    lines.append(f"tokens/s/rank   {step.tokens_per_second / ranks:,.0f}")
    lines.append(f"MFU             {step.mfu:.1%} of {device.peak_of(step.dtype) / 1e12:.4g} Tflop/s")
    if (price := step.dollars_per_million_tokens) is not None:
        lines.append(f"price           {price:.3g} USD a million tokens")
    bubble = "bubble, messages" if step.schedule is not None else "bubble"
    times = {
        "compute": found.compute,
        "weights' sums": found.weights,
        bubble: found.messages + found.bubble,
        "gradients' sums": found.data,
        "update": found.optimizer,
    }
    lines += ["", "time of the slowest rank"]
    lines += [
        f"  {name:18} {_seconds(value):>10}  {value / step.seconds:6.1%}" for name, value in times.items() if value
    ]
    if step.schedule is not None and step.trace is not None:
        lines.append(
            f"  {step.schedule.name} on {step.schedule.num_ranks} ranks, {step.schedule.num_stages} stages,"
            f" {step.schedule.num_micro} microbatches: utilisation {step.trace.utilisation():.1%}"
        )
    lines += ["", "memory of the fullest rank"]
    lines += [f"  {name:18} {human_bytes(value):>10}" for name, value in found.memory.items() if value]
    peak, room = found.peak_memory, device.memory
    verdict = "fits" if step.fits else f"does not fit, by {human_bytes(peak - room)}"
    lines.append(f"  {'all':18} {human_bytes(peak):>10}  of {human_bytes(room)}: {verdict}")
    lines += ["", "bytes that a rank sends in a step, by the level of the link"]
    lines += [f"  {level:18} {human_bytes(value):>10}" for level, value in found.sent.items()] or ["  none"]
    return "\n".join(lines)


def write_step_page(path: Path, step: SimulatedStep) -> None:
    """Write a self-contained HTML page with the swimlanes of the pipeline, and the text above them as its title.

    Raises PlanError if the plan has no pipeline, if plotly is not installed or if the file cannot be written.
    """
    from plait.errors import PlanError
    from plait.report.swimlane import draw_swimlanes, page, write_page

    if step.trace is None:
        raise PlanError(f"the plan {step.plan.title!r} has no pipeline to draw; leave --html out, or add pipeline=")
    title = f"{step.plan.title} on {step.cluster.name}: {_seconds(step.seconds)} a step"
    write_page(path, page(draw_swimlanes(predicted=step.trace, unit="seconds"), title))


def _seconds(value: float) -> str:
    return f"{value:.3g} s" if value >= 1 else f"{value * 1e3:.3g} ms"
