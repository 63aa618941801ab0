"""Bytes on the wire of one data-parallel step: the formula, what plait counts by link, and what loopback carried.

    python -m bench.wire_bytes [--write]

Ranks of one host exchange through shared memory, of which the kernel keeps no count; so each plan also runs over Gloo
on loopback, whose counter is read around the steps. Headers and acknowledgements are in that count, and what anything
else sent in the meantime, hence the smallest of several turns.
"""

from __future__ import annotations

from pathlib import Path

from bench import variants
from bench.harness import Group, Variant, arguments, publish
from bench.variants import PlaitStep

PLANS = ("data=2", "data=4", "data=4 allreduce=ring", "data=4 allreduce=naive")
NUM_TURNS, NUM_STEPS = 5, 3


def links(step: PlaitStep) -> tuple[int, int]:
    """Bytes that this rank has sent along `data` since the last call, and bytes of all gradients."""
    comm = step.trainer.world.comm("data")
    sent = comm.links.total()
    comm.links.reset()
    return sent, sum(p.nbytes for p in step.trainer.executor.parameters.values())


def loopback_bytes() -> int:
    """Bytes that the loopback interface has sent since the machine started."""
    line = next(line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("lo:"))
    return int(line.split(":")[1].split()[8])


def measure(plan: str, num_ranks: int, shared_memory: bool) -> tuple[float, float, float | None]:
    """Per rank and step: bytes of the gradients, bytes counted by link, bytes that loopback carried."""
    group = Group(Variant(plan, variants.plait, ("small", plan, shared_memory), num_ranks))
    try:
        group.turn(1)
        group.call(links)
        carried = []
        for _ in range(NUM_TURNS):
            before = loopback_bytes()
            group.turn(NUM_STEPS)
            carried.append(loopback_bytes() - before)
        counted = group.call(links)
    finally:
        group.close()
    sent = sum(each for each, _ in counted) / (num_ranks * NUM_STEPS * NUM_TURNS)
    return counted[0][1], sent, None if shared_memory else min(carried) / (num_ranks * NUM_STEPS)


def main() -> None:
    given = arguments(__doc__)
    lines = ["| plan | transport | formula | counted by link | loopback |", "|---|---|---|---|---|"]
    for plan in PLANS:
        num_ranks = int(plan[5])
        for shared_memory in (True, False):
            held, counted, carried = measure(plan, num_ranks, shared_memory)
            ways = num_ranks - 1 if "naive" in plan else 2 * (num_ranks - 1) / num_ranks
            formula = ways * held
            wire = f"{carried / 1e6:.2f} ({carried / formula - 1:+.1%})" if carried is not None else ""
            lines.append(
                f"| {plan} | {'shared memory' if shared_memory else 'Gloo'} | {ways:g} x {held / 1e6:.2f} ="
                f" {formula / 1e6:.2f} | {counted / 1e6:.2f} ({counted / formula - 1:+.1%}) | {wire} |"
            )
    about = (
        "MB that each rank sends in one step of the small GPT. The formula is 2(N-1)/N x bytes of the gradients for the"
        " ring and the backend's own way, N-1 x for the naive one. To reach: within 3% of it."
    )
    publish("Bytes on the wire", "\n".join([about, "", *lines]), "wire_bytes", given.write)


if __name__ == "__main__":
    main()
