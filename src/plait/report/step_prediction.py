"""StepPrediction: what `plait.simulate` says of a step. Printed, it is a table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from plait.cost.memory_model import human_bytes
from plait.cost.step_program import StepProgram
from plait.cost.step_simulation import SimulatedProgram
from plait.errors import PlanError
from plait.plan.plan import Plan
from plait.report.memory_table import MemoryEstimate
from plait.report.simulation_text import memory_line, not_counted, shown_seconds, time_lines
from plait.spec.cluster import Cluster
from plait.spec.trace import Trace


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
