"""What `plait memory` predicts against what real processes take in a step, data=2.

    python -m bench.memory_prediction [small wide] [--write]

allocated   the most that torch's allocator had given out at a time, with the shared memory that the rank sends from
resident    peak resident memory (VmHWM) of steps, less what the process has without its tensors: its size once the
            trainer is prepared and freed memory is given back, less the tensors that the trainer then holds. What the C
            library cannot reuse counts, and what MKL keeps for itself; pages of shared memory count for each process
            that touches them
"""

from __future__ import annotations

import ctypes
import gc
import os
import re
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from bench.harness import Group, Variant, arguments, publish
from bench.variants import PlaitStep
from bench.workloads import WORKLOADS, loss_fn, optimizer
from plait.api.memory import Estimator
from plait.plan.plan import Plan

PLANS = [
    f"data=2 zero={zero} recompute={recompute} precision={precision}"
    for precision in ("fp32", "bf16")
    for recompute in ("none", "layer")
    for zero in range(4)
]


class Measured(PlaitStep):
    """A step that knows what its process takes without tensors."""

    def __init__(self, workload: str, plan: str) -> None:
        super().__init__(workload, plan, shared_memory=True)
        self.trainer.prepare(self.batch)
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        self.base = _resident() - self.held_bytes()

    def held_bytes(self) -> int:
        """Of the tensors that live from step to step."""
        replica, updates = self.trainer.executor, self.trainer.optimizer
        held: list[Any] = [
            *replica.parameters.values(),
            *replica.rank_parameters.inputs.values(),
            *replica.buffers.values(),
        ]
        held += [value for state in updates.state.values() for value in state.values()]
        found = {s.data_ptr(): s.nbytes() for s in (t.untyped_storage() for t in held if torch.is_tensor(t))}
        return sum(found.values())

    def shared_bytes(self) -> int:
        """Pages of this rank's shared memory that were ever touched."""
        comms = [self.trainer.world.comm("data"), self.trainer.world.everyone()]
        return sum(os.fstat(comm._own.fd).st_blocks * 512 for comm in comms)


def build(workload: str, plan: str) -> Measured:
    return Measured(workload, plan)


def base_of(step: Measured) -> int:
    return step.base


def allocated(step: Measured) -> int:
    """The most bytes at a time over one step."""
    total = most = step.held_bytes()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        step()
    for event in found.profiler.kineto_results.events():
        if event.name() == "[memory]":
            total += event.nbytes()
            most = max(most, total)
    return most + step.shared_bytes()


def _resident() -> int:
    found = re.search(r"VmRSS:\s*(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def measured(workload: str, plan: str) -> tuple[float, float]:
    """Allocated and resident bytes of the fullest rank."""
    group = Group(Variant(plan, build, (workload, plan)))
    try:
        bases = group.call(base_of)
        peaks = group.memory(4)
        most = max(group.call(allocated))
    finally:
        group.close()
    return most, max(peak.steps * 2**20 - base for peak, base in zip(peaks, bases, strict=True))


def main() -> None:
    given = arguments(__doc__, WORKLOADS)
    parts = ["MiB of the fullest rank, and over the prediction. To reach: allocated between 0.9 and 1.1 of it."]
    for workload in given.workloads:
        job = WORKLOADS[workload]
        estimator = Estimator(job.model(), loss_fn, job.batch(), optimizer)
        rows = []
        for plan in PLANS:
            expected = estimator.estimate(Plan.parse(plan)).fullest.step_peak
            cells = [f"{found / 2**20:.0f} ({found / expected:.3f})" for found in measured(workload, plan)]
            rows.append(f"| {plan} | {expected / 2**20:.0f} | {' | '.join(cells)} |")
        head = "| plan | predicted | allocated | resident |\n|---|---|---|---|"
        parts.append("\n".join([f"## {workload}", "", head, *rows]))
    publish("Memory: predicted and measured", "\n\n".join(parts), "memory_prediction", given.write)


if __name__ == "__main__":
    main()
