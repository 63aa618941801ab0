"""Step time of backend=xla on two virtual devices of one process against two ranks of PyTorch, on CPUs.

python -m bench.xla [small wide] [--rounds 9] [--write]
"""

from __future__ import annotations

from bench import variants
from bench.harness import Variant, publish_comparison
from bench.workloads import WORKLOADS

TARGETS = """What XLA's CPU backend makes of the same step. TPUs are what it is for, and no TPU was at hand: nothing is
to be reached. Compiling is not in the times: it is done before the first round. bf16 is autocast."""

_DEVICES = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2 --xla_cpu_multi_thread_eigen=false"}


def contenders(workload: str) -> list[Variant]:
    found = []
    for plan in ("data=2", "data=2 zero=3", "data=2 precision=bf16"):
        found.append(Variant(f"plait {plan}", variants.plait, (workload, plan)))
        found.append(
            Variant(
                f"plait {plan} backend=xla", variants.plait, (workload, f"{plan} backend=xla"), num_ranks=1,
                env=_DEVICES | {"JAX_PLATFORMS": "cpu"},
            )
        )  # fmt: skip
    return found


def main() -> None:
    bases = [each.name for each in contenders("small") if "xla" not in each.name]
    publish_comparison(__doc__, "XLA on CPUs, 2 devices", TARGETS, WORKLOADS, contenders, bases, "xla")


if __name__ == "__main__":
    main()
