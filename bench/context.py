"""Step time of context=N of each kind, against torch's ring attention and Ulysses written by hand.

    python -m bench.context [long] [--rounds 9] [--write]

torch's `context_parallel` does not run on a CPU, whose kernel of attention it does not know: the peer calls the same
templates with that kernel (bench/split_sequence.py), and torch's DDP sums the gradients.
"""

from __future__ import annotations

from bench import variants
from bench.harness import Variant, arguments, compare, publish, table
from bench.workloads import LONG
from plait import explain
from plait.api.job.gpt import loss_fn

TARGETS = "To reach: not slower than either peer, and the bytes of the formula within 2%."
SIZES = (2, 4)
KINDS = ("ulysses", "ring", "gather")


def contenders(workload: str, size: int) -> list[Variant]:
    peers = [
        Variant("Ulysses by hand, Gloo", variants.context, (workload, "ulysses"), num_ranks=size),
        Variant("torch's ring, Gloo", variants.context, (workload, "ring"), num_ranks=size),
    ]
    own = []
    for kind in KINDS:
        plan = f"context={size} context.kind={kind}"
        own.append(Variant(kind, variants.plait, (workload, plan), num_ranks=size))
        own.append(Variant(f"{kind}, Gloo", variants.plait, (workload, plan, False), num_ranks=size))
    return peers + own


def formula_bytes(workload: str, kind: str, size: int) -> float:
    """Bytes of activations that each rank sends in a step. A part is 1/N of the positions of an activation.

    ulysses  8 all-to-alls, of which each sends (N-1)/N of a part
    ring     keys and values N-1 times forward and N-1 times backward, and their gradients N-1 times
    gather   2 all-gathers of N-1 parts, and 2 reduce-scatters
    """
    job = LONG[workload]
    part = job.rows * job.sequence // size * job.width * 4
    parts = {"ulysses": 8 * (size - 1) / size, "ring": 6 * (size - 1), "gather": 4 * (size - 1)}[kind]
    return job.num_layers * parts * part


def sent_bytes(workload: str, kind: str, size: int) -> float:
    """The bytes that `explain` lists of the blocks, which tests/test_context.py counts on the wire."""
    job = LONG[workload]
    found = explain(job.model(), loss_fn, job.batch(), f"context={size} context.kind={kind}")
    activations = [one for one in found.collectives if one.value and not one.value[0].isdigit()]  # not "28 gradients"
    return sum(one.sent_bytes for one in activations if one.module.startswith("blocks"))


def bytes_table(workload: str) -> str:
    lines = ["| kind | ranks | MiB a rank sends | by formula | ratio |", "|---|---|---|---|---|"]
    for kind in KINDS:
        for size in SIZES:
            sent, formula = sent_bytes(workload, kind, size), formula_bytes(workload, kind, size)
            lines.append(f"| {kind} | {size} | {sent / 2**20:.3f} | {formula / 2**20:.3f} | {sent / formula:.4f} |")
    return "\n".join(lines)


def main() -> None:
    given = arguments(__doc__, LONG)
    parts = [TARGETS]
    for workload in given.workloads:
        job = LONG[workload]
        parts.append(
            f"## {workload}: {job.num_layers} layers of width {job.width}, {job.rows} x {job.sequence} bytes\n\n"
            + bytes_table(workload)
        )
        for size in SIZES:
            results = compare(contenders(workload, size), given.rounds, given.steps, memory=False)
            parts.append(f"### {size} processes\n\n{table(results, ['Ulysses by hand, Gloo', _RING])}")
    publish("Context parallel", "\n\n".join(parts), "context", given.write)


_RING = "torch's ring, Gloo"

if __name__ == "__main__":
    main()
