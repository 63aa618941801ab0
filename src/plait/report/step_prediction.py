"""StepPrediction: what `plait.simulate` says of a step. Printed, it is a table; it also has a page."""

from __future__ import annotations

import os.path
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from plait.cost.memory_model import human_bytes
from plait.cost.step_program import StepProgram
from plait.cost.step_simulation import SimulatedProgram
from plait.cost.transformer_simulation import SimulatedStep, larger_buckets
from plait.errors import PlanError
from plait.plan.compression import NO_COMPRESSION
from plait.plan.key_values import Bytes
from plait.plan.plan import Plan
from plait.report.memory_table import MemoryEstimate
from plait.spec.cluster import Cluster
from plait.spec.trace import Trace


def describe_step(step: SimulatedStep) -> str:
    """A table of the step's time, memory and bytes sent."""
    found, device = step.estimate, step.cluster.device
    ranks = step.plan.num_processes
    lines = [f"plan {step.plan.title} on {ranks} of {step.cluster.name}: {step.cluster.num_devices} x {device.name}"]
    lines.append(f"{step.rows} sequences, {step.tokens} tokens a step, products in {step.dtype}")
    lines += ["", f"step            {shown_seconds(step.seconds)}", f"tokens/s        {step.tokens_per_second:,.0f}"]
    lines.append(f"tokens/s/rank   {step.tokens_per_second / ranks:,.0f}")
    lines.append(f"MFU             {step.mfu:.1%} of {device.peak_of(step.dtype) / 1e12:.4g} Tflop/s")
    if step.schedule is None:
        lines.append(f"utilisation     {step.trace.utilisation():.1%}")
    if (price := step.dollars_per_million_tokens) is not None:
        lines.append(f"price           {price:.3g} USD a million tokens")
    lines += ["", "time of the slowest rank"]
    lines += time_lines(step.parts, step.seconds)
    if (larger := larger_buckets(step)) is not None:
        given, size = (Bytes().show(each) for each in (step.plan.bucket_bytes, larger[0]))
        lines.append(f"  bucket={size} would save {shown_seconds(larger[1])} of gradients' sums, beside bucket={given}")
    if step.schedule is not None:
        first = "" if step.num_simulated == step.plan.micro else f", of the first {step.num_simulated}"
        lines.append(
            f"  {step.schedule.name} on {step.schedule.num_ranks} ranks, {step.schedule.num_stages} stages,"
            f" {step.plan.micro} microbatches{first}: utilisation {step.trace.utilisation():.1%}"
        )
    lines += ["", "memory of the fullest rank"]
    lines += [f"  {name:18} {human_bytes(value):>10}" for name, value in found.memory.items() if value]
    lines.append(memory_line(found.peak_memory, device.memory))
    if found.host_memory:
        lines += ["", "memory of a rank outside the device"]
        lines += [f"  {name:18} {human_bytes(value):>10}" for name, value in found.host_memory.items() if value]
    lines += ["", "bytes that a rank sends in a step, by the level of the link"]
    lines += [f"  {level:18} {human_bytes(value):>10}" for level, value in found.sent.items()] or ["  none"]
    lines += not_counted(step.plan)
    return "\n".join(lines)


def time_lines(times: Mapping[str, float], whole: float) -> list[str]:
    """A line for each of the times, with its fraction of the whole."""
    return [f"  {name:20} {shown_seconds(value):>8}  {value / whole:6.1%}" for name, value in times.items() if value]


def memory_line(peak: float, room: float) -> str:
    """The line that says whether a peak fits into a device's memory."""
    verdict = "fits" if peak <= room else f"does not fit, by {human_bytes(peak - room)}"
    return f"  {'all':18} {human_bytes(peak):>10}  of {human_bytes(room)}: {verdict}"


def not_counted(plan: Plan) -> list[str]:
    """A line that names the keys of a plan of which simulated times know nothing; none if there is no such key."""
    keys = [
        (plan.allreduce != "backend", f"allreduce={plan.allreduce}, as if it were the fastest that the links have"),
        (plan.compile != "none", f"compile={plan.compile}, as if each op ran by itself"),
        (plan.cudagraphs == "yes", "cudagraphs=yes"),
        (bool(plan.shapes), "shapes=, as if the batch were not padded"),
        (plan.compress != NO_COMPRESSION, f"what coding and decoding of compress={plan.compress} computes"),
    ]
    left_out = [text for given, text in keys if given]
    return ["", f"not counted: {'; '.join(left_out)}"] if left_out else []


def check_step_page(path: Path | None) -> None:
    """Raise PlanError for a page that cannot be written: its folder is not there, or it is a folder itself."""
    if path is not None and (os.path.isdir(path) or not os.path.isdir(path.absolute().parent)):
        why = "it is a folder" if os.path.isdir(path) else f"there is no folder {str(path.absolute().parent)!r}"
        raise PlanError(f"cannot write --html {str(path)!r}: {why}; give a file in a folder that is there")


def write_step_page(path: Path, plan: str, cluster: str, seconds: float, trace: Trace) -> None:
    """Write a self-contained HTML page with the swimlanes of the ranks, and the text above them as its title.

    Raises PlanError if plotly is not installed or if the file cannot be written.
    """
    from plait.report.swimlane import draw_swimlanes, page, write_page

    title = f"{plan} on {cluster}: {shown_seconds(seconds)} a step"
    write_page(path, page(draw_swimlanes(predicted=trace, unit="seconds"), title))


def shown_seconds(value: float) -> str:
    """Seconds as text: 0.0125 -> '12.5 ms'."""
    return f"{value:.3g} s" if value >= 1 else f"{value * 1e3:.3g} ms"


@dataclass(frozen=True)
class StepPrediction:
    """What a step of a plan takes on a cluster.

    Attributes:
        plan: the plan.
        cluster: where it runs.
        program: what the ranks issue.
        simulated: its times, bytes sent and trace.
        memory: of each rank; None if it was not asked for, and for a model of which only a few layers were lowered.
        replicas: that agree later than at every step, or compressed; program and times are those of one of them.
        exchanges: seconds a step of what replicas exchange, as far as steps do not hide it.
        exchanged: bytes a step that a rank sends for it, by the level of the link.
    """

    plan: Plan
    cluster: Cluster
    program: StepProgram
    simulated: SimulatedProgram
    memory: MemoryEstimate | None
    replicas: int = 1
    exchanges: float = 0.0
    exchanged: Mapping[str, float] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """Seconds from the start of a step to the start of the next."""
        return self.simulated.seconds + self.exchanges

    @property
    def rows_per_second(self) -> float:
        return self.program.rows * self.replicas / self.seconds

    @property
    def tokens_per_second(self) -> float:
        """Tokens of the batch, or rows if it has none, per second."""
        return self.program.tokens * self.replicas / self.seconds

    @property
    def mfu(self) -> float:
        """The flop/s of the model's products, without recomputation, over the peak of the ranks' devices."""
        peak = self.cluster.device.peak_of(self.program.dtype) * self.plan.num_processes
        return self.program.model_flops * self.replicas / self.seconds / peak

    @property
    def sent(self) -> dict[str, float]:
        """Bytes that a rank sends in a step, by the level of the link, for the rank that sends most."""
        levels = dict.fromkeys((*self.simulated.sent, *self.exchanged))
        return {level: self.simulated.sent.get(level, 0.0) + self.exchanged.get(level, 0.0) for level in levels}

    @property
    def trace(self) -> Trace:
        """Of a rank at each place of the pipeline, or of rank 0."""
        return self.simulated.trace

    @property
    def peak_memory(self) -> int:
        """Bytes on the fullest rank. Raises PlanError if the memory was not asked for."""
        if self.memory is None:
            raise PlanError("the memory was not predicted; `plait.memory` predicts that of models of any depth")
        return self.memory.peak

    @property
    def fits(self) -> bool:
        """Whether the memory of every rank is within that of a device."""
        return self.peak_memory <= self.cluster.device.memory

    @property
    def dollars_per_million_tokens(self) -> float | None:
        """The price of the plan's devices; None where it is not known."""
        price = self.cluster.device.price_per_hour
        return None if price is None else price * self.plan.num_processes / 3600 / self.tokens_per_second * 1e6

    def __str__(self) -> str:
        device, ranks, found = self.cluster.device, self.plan.num_processes, self.simulated
        lines = [
            f"plan {self.plan.title} on {ranks} of {self.cluster.name}: {self.cluster.num_devices} x {device.name}"
        ]
        rows, tokens = self.program.rows * self.replicas, self.program.tokens * self.replicas
        lines.append(f"{rows} rows, {tokens} tokens a step, products in {self.program.dtype}")
        lines += [
            "",
            f"step            {shown_seconds(self.seconds)}",
            f"tokens/s        {self.tokens_per_second:,.0f}",
        ]
        lines.append(f"tokens/s/rank   {self.tokens_per_second / ranks:,.0f}")
        lines.append(f"MFU             {self.mfu:.1%} of {device.peak_of(self.program.dtype) / 1e12:.4g} Tflop/s")
        lines.append(f"utilisation     {self.trace.utilisation() * found.seconds / self.seconds:.1%}")
        if (price := self.dollars_per_million_tokens) is not None:
            lines.append(f"price           {price:.3g} USD a million tokens")
        lines += ["", "time of the slowest rank"]
        lines += time_lines({**found.times, "exchanges": self.exchanges}, self.seconds)
        if self.memory is not None:
            fullest = self.memory.fullest
            lines += ["", "memory of the fullest rank, at its peak"]
            lines += [f"  {name:18} {human_bytes(value):>10}" for name, value in fullest.at_peak.items() if value]
            lines.append(memory_line(self.peak_memory, device.memory))
        else:
            lines += ["", "memory: not predicted"]
        lines += ["", "bytes that a rank sends in a step, by the level of the link"]
        lines += [f"  {level:18} {human_bytes(value):>10}" for level, value in self.sent.items()] or ["  none"]
        lines += not_counted(self.plan)
        return "\n".join(lines)
