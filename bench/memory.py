"""Peak memory of each rank (VmHWM, in fresh processes), against torch's DDP and one device.

    python -m bench.memory [small wide] [--write]

A page of shared memory counts for every process that has touched it, so ranks that exchange through shared memory are
charged for it in full.
"""

from __future__ import annotations

from bench import variants
from bench.harness import Memory, Variant, arguments, peak, publish
from bench.workloads import WORKLOADS


def contenders(workload: str) -> list[Variant]:
    return [
        Variant("torch DDP", variants.torch_ddp, (workload,)),
        Variant("one device, whole batch", variants.one_device, (workload,), num_ranks=1),
        Variant("plait data=2", variants.plait, (workload, "data=2")),
        Variant("plait tensor=2", variants.plait, (workload, "tensor=2")),
    ]


def row(name: str, found: Memory, base: Memory) -> str:
    return f"| {name} | {found.life:.0f} | {found.life / base.life:.3f} | {found.steps:.0f} | {found.start:.0f} |"


def main() -> None:
    given = arguments(__doc__, WORKLOADS)
    parts = ["MiB of the fullest rank. To reach: plait data=2 at most 1.03 of DDP."]
    for workload in given.workloads:
        found = {variant.name: peak(variant) for variant in contenders(workload)}
        head = "| variant | peak | / DDP | peak of steps | before the first step |\n|---|---|---|---|---|"
        rows = [row(name, memory, found["torch DDP"]) for name, memory in found.items()]
        parts.append("\n".join([f"## {workload}", "", head, *rows]))
    publish("Memory of a rank", "\n\n".join(parts), "memory", given.write)


if __name__ == "__main__":
    main()
