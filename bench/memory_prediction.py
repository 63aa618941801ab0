"""What `plait memory` predicts against what real processes take: peak resident memory of steps, data=2.

    python -m bench.memory_prediction [small wide] [--write]

Measured is VmHWM over steps other than the first, less what the process has without its tensors: its size once the
trainer is prepared and freed memory is given back, less the tensors that the trainer then holds. Pages of shared memory
count for each process that touches them.
"""

from __future__ import annotations

import ctypes
import gc
import re
from pathlib import Path
from typing import Any

from torch import Tensor

from bench.harness import Group, Variant, arguments, publish
from bench.variants import PlaitStep
from bench.workloads import WORKLOADS, loss_fn, optimizer
from plait import memory

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
        self.base = _resident() - sum(_storages(self.trainer.replica).values())


def build(workload: str, plan: str) -> Measured:
    return Measured(workload, plan)


def base_of(step: Measured) -> int:
    return step.base


def _storages(replica: Any) -> dict[int, int]:
    held: list[Tensor] = [
        *replica.parameters.values(), *replica.variables.inputs.values(), *replica.buffers.values()
    ]  # fmt: skip
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in held}


def _resident() -> int:
    found = re.search(r"VmRSS:\s*(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def measured(workload: str, plan: str) -> float:
    """Bytes of the fullest rank."""
    group = Group(Variant(plan, build, (workload, plan)))
    try:
        bases = group.call(base_of)
        peaks = group.memory(4)
    finally:
        group.close()
    return max(peak.steps * 2**20 - base for peak, base in zip(peaks, bases, strict=True))


def main() -> None:
    given = arguments(__doc__, WORKLOADS)
    parts = ["MiB of the fullest rank. To reach: a ratio between 0.9 and 1.1."]
    for workload in given.workloads:
        job = WORKLOADS[workload]
        rows = []
        for plan in PLANS:
            found = measured(workload, plan)
            expected = memory(job.model(), loss_fn, job.batch(), plan, optimizer=optimizer).fullest.step_peak
            rows.append(f"| {plan} | {expected / 2**20:.0f} | {found / 2**20:.0f} | {found / expected:.3f} |")
        head = "| plan | predicted | measured | measured / predicted |\n|---|---|---|---|"
        parts.append("\n".join([f"## {workload}", "", head, *rows]))
    publish("Memory: predicted and measured", "\n\n".join(parts), "memory_prediction", given.write)


if __name__ == "__main__":
    main()
