"""The loss of the byte GPT after as many tokens with replicas that agree later, and the bytes that each strategy sent.

python -m bench.local_sgd [PLAN ...] [--steps 400] [--write]
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from typing import Any

import torch

from bench.harness import Group, Variant, publish
from bench.staleness import batch, symbols
from bench.workloads import GLOBAL_BATCH, WORKLOADS, loss_fn
from plait import Trainer

NUM_UNSEEN = 64
PLANS = (
    "data=2",
    "data=2 compress=bf16",
    "data=2 compress=fp8",
    "data=2 compress=int8",
    "data=2 compress=int4",
    "data=2 compress=topk:0.01",
    "data=2 compress=powersgd:2",
    "data=2 sync=8",
    "data=2 sync=2..32",
    "data=2 sync=8 moments=averaged",
    "data=2 sync=16 outer=nesterov",
    "data=2 sync=64 outer=nesterov",
    "data=2 sync=64 outer=nesterov compress=int8",
    "data=2 sync=64 outer=nesterov compress=int4",
    "data=2 sync=64 outer=nesterov streaming=4 overlap=2",
)
WARMUP = 50
TEXT = """The small GPT on Python's own source text, 2 processes, AdamW (lr 3e-4, {warmup} steps of warm-up), {steps}
steps of 8 sequences of 128 bytes from the same start, the same batches in the same order. Unseen: the loss of the mean
of the replicas' weights on 64 other sequences. To reach: within 2% of data=2. Seconds are those of a machine on which
ranks share memory."""


class Training:
    """A run of its own: the trainer and its text."""

    def __init__(self, plan: str) -> None:
        adamw = functools.partial(torch.optim.AdamW, lr=3e-4)

        def warmup(optimizer: torch.optim.Optimizer) -> Any:
            return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / WARMUP))

        self.trainer = Trainer(WORKLOADS["small"].model(), loss_fn, adamw, plan, scheduler=warmup)
        self.text = symbols()

    def __call__(self) -> None:
        raise AssertionError("this benchmark trains as a whole")


def train(training: Training, steps: int) -> tuple[float, float, float]:
    """The loss on what was not seen, bytes that this rank sent, and seconds of a step."""
    trainer = training.trainer
    seconds = []
    for step in range(steps):
        rows = batch(training.text, step * GLOBAL_BATCH, GLOBAL_BATCH)
        start = time.perf_counter()
        trainer.step(rows)
        seconds.append(time.perf_counter() - start)
    trainer.agree()
    sent = trainer.world.comm("data").links.total()
    return trainer.evaluate(batch(training.text, 10**6, NUM_UNSEEN)), sent, statistics.fmean(seconds[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plans", nargs="*", default=PLANS, metavar="PLAN", help="the first is the others' measure")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    rows = ["| plan | unseen | against data=2 | bytes sent, of data=2 | ms/step |", "| --- " * 5 + "|"]
    base: tuple[float, float, float] | None = None
    for plan in given.plans:
        group = Group(Variant(plan, Training, (plan,)))
        try:
            found = group.call(train, given.steps)[0]
        finally:
            group.close()
        base = base or found
        unseen, sent, seconds = found
        rows.append(
            f"| `{plan}` | {unseen:.4f} | {unseen / base[0] - 1:+.1%} | 1/{base[1] / sent:.1f} | {seconds * 1e3:.0f} |"
        )
        print(rows[-1], flush=True)
    publish(
        "Agreeing later",
        TEXT.format(warmup=WARMUP, steps=given.steps) + "\n\n" + "\n".join(rows),
        "local_sgd",
        given.write,
    )


if __name__ == "__main__":
    main()
