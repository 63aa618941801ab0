"""What recording a trace costs: the same job with and without it, 2 processes of 1 thread, in alternating turns.

python -m bench.trace_overhead [small wide] [--rounds 15] [--steps 3] [--write]
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable
from typing import Any

from bench.harness import Variant, arguments, compare, publish
from bench.workloads import WORKLOADS, loss_fn, optimizer
from plait.api.trainer import Trainer
from plait.comm.process_world import process_world
from plait.plan.plan import Plan

PLANS = ("pipeline=2 micro=8 schedule=1f1b", "pipeline=2 micro=8 schedule=zb-h1", "tensor=2", "data=2 zero=3 micro=2")
TARGET = "To reach: with a trace at most 1.02 times as long. Ratios within a round, of the mean over its steps."


def job(workload: str, plan: str, traced: bool) -> Callable[[], Any]:
    """The step of a trainer that records, or does not."""
    chosen = Plan.parse(plan)
    folder = tempfile.TemporaryDirectory()
    world = process_world(chosen.mesh, device="cpu")
    trainer = Trainer(
        WORKLOADS[workload].model(), loss_fn, optimizer, chosen, trace=folder.name if traced else None, world=world
    )
    batch = WORKLOADS[workload].batch()

    def step() -> Any:
        assert folder  # which goes with the process
        return trainer.step(batch)

    return step


def main() -> None:
    given = arguments(__doc__, WORKLOADS)
    lines = ["| workload | plan | ms/step without | with / without: min | median | max |", "|---|---|---|---|---|---|"]
    for workload in given.workloads:
        for plan in PLANS:
            variants = [Variant(str(traced), job, (workload, plan, traced)) for traced in (False, True)]
            without, traced = compare(variants, given.rounds, given.steps, memory=False)
            found = traced.ratios(without)
            figures = f"{min(found):.3f} | {statistics.median(found):.3f} | {max(found):.3f}"
            lines.append(f"| {workload} | `{plan}` | {without.median * 1e3:.1f} | {figures} |")
            print(lines[-1], flush=True)
    publish("The cost of a trace", "\n\n".join([TARGET, "\n".join(lines)]), "trace_overhead", given.write)


if __name__ == "__main__":
    main()
