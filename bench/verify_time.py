"""Seconds that plait.verify takes for a two-layer transformer on eight ranks, all of them threads of one process.

python -m bench.verify_time [--write]
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

from bench.harness import Group, Variant, arguments, publish
from bench.workloads import Workload, loss_fn
from plait import verify

PLAN = "data=2 tensor=4"
NUM_ROUNDS = 3


def build() -> Callable[[], None]:
    """What a Group runs must have a step; this one has none to take."""
    return lambda: None


def run_verify(step: Callable[[], None]) -> tuple[float, str]:
    """Seconds, and the report."""
    workload = Workload(num_layers=2)
    model, batch = workload.model(), workload.batch()
    start = time.perf_counter()
    report = verify(model, loss_fn, batch, PLAN)
    assert report.ok, f"{report}"
    return time.perf_counter() - start, str(report)


def main() -> None:
    given = arguments(__doc__)
    first, again, report = [], [], ""
    for _ in range(NUM_ROUNDS):
        group = Group(Variant("verify", build, num_ranks=1))
        first.append(group.call(run_verify)[0][0])
        seconds, report = group.call(run_verify)[0]
        again.append(seconds)
        group.close()
    body = (
        f"GPT of 2 layers, width 256, plan {PLAN}, medians of {NUM_ROUNDS}. To reach: under 10 s.\n\n"
        f"| | seconds |\n|---|---|\n| first in its process | {statistics.median(first):.1f} |\n"
        f"| again | {statistics.median(again):.1f} |\n\n```\n{report}\n```"
    )
    publish("Time of verify", body, "verify_time", given.write)


if __name__ == "__main__":
    main()
