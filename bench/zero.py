"""Step time and peak memory of ZeRO 1 to 3 against torch's FSDP2 and ZeroRedundancyOptimizer, 2 processes.

python -m bench.zero [small wide] [--rounds 9] [--steps 3] [--write]
"""

from __future__ import annotations

from bench import variants
from bench.harness import Variant, publish_comparison
from bench.workloads import WORKLOADS

TARGETS = """To reach: zero=3 / FSDP2 at most 0.75 in time and 1.0 in peak memory; zero=2 / FSDP2 that keeps parameters
whole from forward to backward at most 0.85; zero=1 / DDP with ZeroRedundancyOptimizer at most 0.95."""

FSDP2, KEPT, ZERO1 = "FSDP2", "FSDP2, not resharded", "DDP + ZeroRedundancyOptimizer"


def contenders(workload: str) -> list[Variant]:
    return [
        Variant(FSDP2, variants.torch_fsdp2, (workload,)),
        Variant(KEPT, variants.torch_fsdp2, (workload, False)),
        Variant(ZERO1, variants.torch_zero1, (workload,)),
        Variant("plait zero=3", variants.plait, (workload, "data=2 zero=3")),
        Variant("plait zero=2", variants.plait, (workload, "data=2 zero=2")),
        Variant("plait zero=1", variants.plait, (workload, "data=2 zero=1")),
    ]


def main() -> None:
    bases = [FSDP2, KEPT, ZERO1]
    publish_comparison(__doc__, "ZeRO, 2 processes", TARGETS, WORKLOADS, contenders, bases, "zero")


if __name__ == "__main__":
    main()
