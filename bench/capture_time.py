"""Seconds from an unmodified GPT to the graph that one rank runs: capture, then layout and partition.

python -m bench.capture_time [--write]
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

from bench.harness import Group, Variant, arguments, publish
from bench.workloads import Workload, loss_fn
from plait import Plan
from plait.backends.eager.passes import eager_graphs
from plait.compile.capture.capture import capture
from plait.compile.pipeline import compile

PLAN = "data=2 tensor=2"
NUM_ROUNDS = 3
Times = tuple[float, float, int]


def build() -> Callable[[], None]:
    """What a Group runs must have a step; this one has none to take."""
    return lambda: None


def compile_step(step: Callable[[], None], num_layers: int) -> Times:
    """Seconds of capture and of compiling, and the number of nodes of the result."""
    workload = Workload(num_layers=num_layers)
    model, batch = workload.model(), workload.batch()
    start = time.perf_counter()
    captured = capture(model, loss_fn, batch)
    middle = time.perf_counter()
    graphs = eager_graphs(compile(captured, Plan.parse(PLAN)).program)
    return middle - start, time.perf_counter() - middle, len(graphs["alone"].nodes)


def main() -> None:
    given = arguments(__doc__)
    first: list[Times] = []
    found: dict[int, list[Times]] = {24: [], 96: []}
    for _ in range(NUM_ROUNDS):  # 24 in a fresh process, where all is cold; then both in one that is warm
        for depths in ([24], [2, 24, 96]):
            group = Group(Variant("compile", build, num_ranks=1))
            for depth in depths:
                times = group.call(compile_step, depth)[0]
                if depth in found:
                    (first if depths == [24] else found[depth]).append(times)
            group.close()
    ratios = [sum(deep[:2]) / sum(flat[:2]) for flat, deep in zip(found[24], found[96], strict=True)]
    lines = ["| layers | capture s | layout and partition s | together s | nodes |", "|---|---|---|---|---|"]
    for name, times in (("24, first in its process", first), ("24", found[24]), ("96", found[96])):
        taken, compiled, nodes = (statistics.median(column) for column in zip(*times, strict=True))
        lines.append(f"| {name} | {taken:.1f} | {compiled:.1f} | {taken + compiled:.1f} | {nodes} |")
    about = [
        f"GPT of width 256, plan {PLAN}, one thread, medians of {NUM_ROUNDS}. To reach: 24 layers under 20 s, 96 layers"
        " under 4 times that.",
        f"96 layers / 24 layers: {statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})",
    ]
    publish("Capture, layout and partition", "\n\n".join([*about, "\n".join(lines)]), "capture_time", given.write)


if __name__ == "__main__":
    main()
