"""Step time in bf16 against float32, 2 processes, and against torch's DDP under autocast and FSDP2 in bf16.

python -m bench.precision [small wide] [--rounds 9] [--steps 3] [--write]
"""

from __future__ import annotations

from bench import variants
from bench.harness import Variant, publish_comparison
from bench.workloads import WORKLOADS

TARGETS = "To reach on wide: bf16 at least 1.3 times as fast as float32, which is a ratio of at most 0.77."


def contenders(workload: str) -> list[Variant]:
    return [
        Variant("plait data=2", variants.plait, (workload, "data=2")),
        Variant("plait data=2 precision=bf16", variants.plait, (workload, "data=2 precision=bf16")),
        Variant("plait data=2 zero=2 precision=bf16", variants.plait, (workload, "data=2 zero=2 precision=bf16")),
        Variant("torch DDP, autocast to bf16", variants.torch_autocast, (workload,)),
        Variant("plait data=2 precision=bf16-params", variants.plait, (workload, "data=2 precision=bf16-params")),
        Variant(
            "plait data=2 zero=3 precision=bf16-params",
            variants.plait,
            (workload, "data=2 zero=3 precision=bf16-params"),
        ),
        Variant("torch FSDP2, param_dtype bf16", variants.torch_fsdp2, (workload, True, True)),
    ]


def main() -> None:
    bases = ["plait data=2"]
    publish_comparison(__doc__, "Precision, 2 processes", TARGETS, WORKLOADS, contenders, bases, "precision")


if __name__ == "__main__":
    main()
