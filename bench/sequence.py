"""Step time of tensor=4 sequence=yes, against tensor=4 alone and Megatron's sequence parallelism written by hand.

python -m bench.sequence [small wide] [--rounds 9] [--write]
"""

from __future__ import annotations

from bench import variants
from bench.harness import Variant, publish_comparison
from bench.workloads import WORKLOADS

TARGETS = "To reach: sequence=yes is not slower than tensor=4 alone, nor than the layer written by hand."


def contenders(workload: str) -> list[Variant]:
    return [
        Variant("tensor=4", variants.plait, (workload, "tensor=4"), num_ranks=4),
        Variant("hand-written, Gloo", variants.megatron_sequence, (workload,), num_ranks=4),
        Variant("tensor=4 sequence=yes", variants.plait, (workload, "tensor=4 sequence=yes"), num_ranks=4),
        Variant("the same over Gloo", variants.plait, (workload, "tensor=4 sequence=yes", False), num_ranks=4),
    ]


def main() -> None:
    title, bases = "Sequence parallel, 4 processes", ["tensor=4", "hand-written, Gloo"]
    publish_comparison(__doc__, title, TARGETS, WORKLOADS, contenders, bases, "sequence")


if __name__ == "__main__":
    main()
