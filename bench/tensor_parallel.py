"""Step time of tensor=2, nothing annotated, against torch's parallelize_module and a split written by hand.

python -m bench.tensor_parallel [small wide] [--rounds 9] [--write]
"""

from __future__ import annotations

from bench import variants
from bench.harness import Variant, publish_comparison
from bench.workloads import WORKLOADS

TARGETS = "To reach on small: plait / parallelize_module at most 0.75; plait / hand-written at most 0.90."


def contenders(workload: str) -> list[Variant]:
    return [
        Variant("parallelize_module", variants.torch_parallelize, (workload,)),
        Variant("hand-written", variants.megatron, (workload,)),
        Variant("plait tensor=2", variants.plait, (workload, "tensor=2")),
    ]


def main() -> None:
    title, bases = "Tensor parallel, 2 processes", ["parallelize_module", "hand-written"]
    publish_comparison(__doc__, title, TARGETS, WORKLOADS, contenders, bases, "tensor_parallel")


if __name__ == "__main__":
    main()
