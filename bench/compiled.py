"""Step time of compiled plans against the same plans run op by op, and against torch.compile of torch's DDP.

python -m bench.compiled [small wide] [--rounds 9] [--write]
"""

from __future__ import annotations

from bench import variants
from bench.harness import Variant, publish_comparison
from bench.workloads import WORKLOADS

TARGETS = """To reach: a compiled plan takes at most the time of the same plan op by op, and data=2 at most that of
torch.compile of torch's DDP; with no more memory than op by op.

Compiling is not in the times: it is done before the first round. bf16 is autocast."""

PLANS = ("data=2", "data=2 zero=3", "tensor=2", "pipeline=2 micro=4", "data=2 precision=bf16")


def contenders(workload: str) -> list[Variant]:
    found = [
        Variant("torch DDP", variants.torch_ddp, (workload,)),
        Variant("torch.compile of DDP", variants.torch_compiled, (workload,)),
        Variant("torch.compile of DDP, bf16", variants.torch_compiled, (workload, True)),
    ]
    for plan in PLANS:
        for compiled in ("", " compile=inductor"):
            found.append(Variant(f"plait {plan}{compiled}", variants.plait, (workload, f"{plan}{compiled}")))
    return found


def main() -> None:
    bases = ["torch.compile of DDP", *(f"plait {plan}" for plan in PLANS)]
    publish_comparison(__doc__, "Compiled, 2 processes", TARGETS, WORKLOADS, contenders, bases, "compiled")


if __name__ == "__main__":
    main()
