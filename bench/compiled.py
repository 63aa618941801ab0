"""Step time of compiled plans against the same plans run op by op, and against torch.compile of torch's DDP.

python -m bench.compiled [small-fp32 small-bf16 small-plans wide-fp32 ...] [--rounds 9] [--write]

A piece has a few variants, so that it ends where processors are shared: each piece is a section of the page with a
machine and a date of its own, and --write replaces those that were run.
"""

from __future__ import annotations

import re

from bench import variants
from bench.harness import DOCS, Variant, arguments, compare, machine, table
from bench.workloads import WORKLOADS

TARGETS = """To reach: a compiled plan takes at most the time of the same plan op by op, and data=2 at most that of
torch.compile of torch's DDP; with no more memory above rest than op by op.

Compiling is not in the times: it is done before the first round. bf16 is autocast. Ratios are medians over rounds, with
the least and the largest. Inductor's own code, some 40 MiB, is in the peak, and not in what is above rest."""

_PLANS = {"fp32": ("data=2",), "bf16": ("data=2 precision=bf16",),
          "plans": ("data=2 zero=3", "tensor=2", "pipeline=2 micro=4")}  # fmt: skip
PIECES = {f"{workload}-{kind}": (workload, kind) for workload in WORKLOADS for kind in _PLANS}


def contenders(workload: str, kind: str) -> list[Variant]:
    found = []
    for plan in _PLANS[kind]:
        for name in (plan, f"{plan} compile=inductor"):
            found.append(Variant(f"plait {name}", variants.plait, (workload, name)))
    if kind != "plans":
        found.append(Variant("torch.compile of DDP", variants.torch_compiled, (workload, kind == "bf16")))
    return found


def main() -> None:
    given = arguments(__doc__, PIECES)
    path = DOCS / "compiled.md"
    known = (
        dict(re.findall(r"^## (\S+)\n\n(.*?)(?=\n+## |\n*\Z)", path.read_text(), re.M | re.S)) if path.exists() else {}
    )
    for piece in given.workloads:
        variants_of = contenders(*PIECES[piece])
        bases = [each.name for each in variants_of if "compile" not in each.name]
        bases += [each.name for each in variants_of if each.name.startswith("torch")]
        known[piece] = f"{machine()}\n\n{table(compare(variants_of, given.rounds, given.steps), bases)}"
        print(f"## {piece}\n\n{known[piece]}\n", flush=True)
        if given.write:
            parts = [f"## {name}\n\n{known[name]}" for name in PIECES if name in known]
            path.write_text("\n\n".join(["# Compiled, 2 processes", TARGETS, *parts]) + "\n")


if __name__ == "__main__":
    main()
