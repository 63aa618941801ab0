"""Step time and peak memory of pipelines against torch.distributed.pipelining: 2 stages on 2 processes, 8 microbatches.

python -m bench.pipeline [small wide] [--rounds 9] [--steps 3] [--write]
"""

from __future__ import annotations

from bench import variants
from bench.harness import Variant, arguments, compare, publish, table
from bench.workloads import WORKLOADS

NUM_MICRO = 8
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-v")
TARGETS = """To reach: plait / torch.distributed.pipelining, schedule by schedule, at most 0.90 in time and 1.0 in peak
memory of the fuller rank. Global batch of 8 sequences, so that a microbatch is one; 8 blocks, cut by torch's user
between blocks and by plait where its search for the best cut says. AdamW of both is fused (torch's default is not)."""


def main() -> None:
    given = arguments(__doc__, WORKLOADS)
    parts = []
    for workload in given.workloads:
        for schedule in SCHEDULES:
            name = f"torch {schedule}"
            contenders = [
                Variant(name, variants.torch_pipelining, (workload, schedule, NUM_MICRO)),
                Variant(
                    f"plait {schedule}",
                    variants.plait,
                    (workload, f"pipeline=2 micro={NUM_MICRO} schedule={schedule}"),
                ),
            ]
            results = compare(contenders, given.rounds, given.steps)
            parts.append(f"## {workload}, {schedule}\n\n{table(results, [name])}")
            print(parts[-1], flush=True)
    publish("Pipelines, 2 processes", "\n\n".join([TARGETS, *parts]), "pipeline", given.write)


if __name__ == "__main__":
    main()
