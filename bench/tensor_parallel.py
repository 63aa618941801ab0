"""Step time of tensor=2, nothing annotated, against torch's parallelize_module and a split written by hand.

python -m bench.tensor_parallel [small wide] [--rounds 9] [--write]
"""

from __future__ import annotations

from bench import variants
from bench.harness import Variant, arguments, compare, publish, table
from bench.workloads import WORKLOADS

TARGETS = "To reach on small: plait / parallelize_module at most 0.75; plait / hand-written at most 0.90."


def contenders(workload: str) -> list[Variant]:
    return [
        Variant("parallelize_module", variants.torch_parallelize, (workload,)),
        Variant("hand-written", variants.megatron, (workload,)),
        Variant("plait tensor=2", variants.plait, (workload, "tensor=2")),
    ]


def main() -> None:
    given = arguments(__doc__, WORKLOADS)
    parts = []
    for workload in given.workloads:
        results = compare(contenders(workload), given.rounds, given.steps)
        parts.append(f"## {workload}\n\n{table(results, ['parallelize_module', 'hand-written'])}")
    publish("Tensor parallel, 2 processes", "\n\n".join([TARGETS, *parts]), "tensor_parallel", given.write)


if __name__ == "__main__":
    main()
