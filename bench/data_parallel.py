"""Step time of data=2 against torch's DDP and against two processes that do not talk at all, which is the ideal.

python -m bench.data_parallel [small wide] [--rounds 9] [--write]
"""

from __future__ import annotations

from bench import variants
from bench.harness import Variant, publish_comparison
from bench.workloads import WORKLOADS

TARGETS = """To reach: plait / DDP at most 0.95; plait / ideal at most 1.053 (95% of its throughput).

Every contender gets `partial(AdamW, lr=3e-4)`; PyTorch then runs its for-loop on CPU, while plait chooses the fused
update where the user left the choice open. The rows with fused AdamW show what that alone is worth."""


def contenders(workload: str) -> list[Variant]:
    return [
        Variant("torch DDP", variants.torch_ddp, (workload,)),
        Variant("two independent processes", variants.independent, (workload,)),
        Variant("torch DDP, fused AdamW", variants.torch_ddp, (workload, True)),
        Variant("two independent, fused AdamW", variants.independent, (workload, True)),
        Variant("plait data=2", variants.plait, (workload, "data=2")),
    ]


def main() -> None:
    bases = ["torch DDP", "two independent processes"]
    publish_comparison(__doc__, "Data parallel, 2 processes", TARGETS, WORKLOADS, contenders, bases, "data_parallel")


if __name__ == "__main__":
    main()
