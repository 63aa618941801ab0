"""Loss against tokens, seconds and bytes on a slow link: ranks in network namespaces (scripts/slow-links).

python -m bench.local_sgd_curves [--rate 100mbit] [--steps 160] [--out curves.html] [--write]

Needs root, iproute2 and a kernel with tbf, as bench.slow_links does. The page is that of `plait compare`.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import subprocess
import time
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

from bench.harness import publish
from bench.local_sgd import WARMUP
from bench.slow_links import SCRIPT, started
from bench.staleness import batch, symbols
from bench.workloads import GLOBAL_BATCH, SEQUENCE, WORKLOADS, loss_fn
from plait import Plan, Trainer
from plait.comm.process_world import process_world
from plait.cost.efficiency import Curve, compare_curves
from plait.report.comparison import comparison_page, comparison_table

PLANS = {
    "every step": "data=2",
    "int8": "data=2 compress=int8",
    "PowerSGD": "data=2 compress=powersgd:2",
    "local SGD": "data=2 sync=8",
    "DiLoCo": "data=2 sync=32 outer=nesterov",
    "streaming DiLoCo": "data=2 sync=32 outer=nesterov streaming=4 overlap=2 compress=int8",
}
EVERY, NUM_UNSEEN = 10, 32
WHICH = "held-out loss"
TEXT = """The small GPT on Python's own source text, 2 ranks whose links are of {rate}, AdamW (lr 3e-4, {warmup} steps
of warm-up), {steps} steps of 8 sequences of 128 bytes; held-out loss, of the mean of the replicas' weights, on 32
other sequences. Efficiency, throughput and goodput against data=2."""


def train(plan: str, steps: int) -> dict[str, list[float]]:
    """In a rank: the held-out loss now and then, and the seconds and bytes up to there."""
    torch.set_num_threads(1)
    chosen = Plan.parse(plan)
    world = process_world(chosen.mesh, shared_memory=False)
    adamw = functools.partial(torch.optim.AdamW, lr=3e-4)

    def warmup(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / WARMUP))

    trainer = Trainer(WORKLOADS["small"].model(), loss_fn, adamw, plan, scheduler=warmup, world=world)
    text = symbols()
    unseen = batch(text, 10**6, NUM_UNSEEN)
    found: dict[str, list[float]] = {"loss": [], "seconds": [], "bytes": []}
    seconds = sent = 0.0
    links = world.comm("data").links
    trainer.prepare(batch(text, 0, GLOBAL_BATCH))
    for step in range(1, steps + 1):
        rows = batch(text, step * GLOBAL_BATCH, GLOBAL_BATCH)
        begun, before = time.perf_counter(), links.total()
        trainer.step(rows)
        if step == steps:
            trainer.agree()
        seconds += time.perf_counter() - begun
        sent += links.total() - before
        if step % EVERY == 0:
            for key, value in (("loss", trainer.evaluate(unseen)), ("seconds", seconds), ("bytes", sent)):
                found[key].append(value)
    found["waited"] = [trainer.state.replicas.take_seconds() if trainer.state.replicas is not None else 0.0]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", default="100mbit")
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--write", action="store_true", help="keep the result in docs/bench/")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker is not None:
        print(json.dumps(train(given.worker, given.steps)), flush=True)
        os._exit(0)
    subprocess.run([SCRIPT, "up", "2", given.rate], check=True)
    try:
        curves = [_curve(name, plan, given.steps) for name, plan in PLANS.items()]
    finally:
        subprocess.run([SCRIPT, "down"], check=True)
    target, found = compare_curves(curves)
    if given.out is not None:
        given.out.write_text(comparison_page(curves, found, list(PLANS.values()), target, WHICH, [{} for _ in PLANS]))
    text = TEXT.format(rate=given.rate, warmup=WARMUP, steps=given.steps)
    table = comparison_table(found, list(PLANS.values()), target, WHICH)
    publish("Agreeing later on a slow link", f"{text}\n\n```text\n{table}\n```", "local_sgd_curves", given.write)


def _curve(name: str, plan: str, steps: int) -> Curve:
    ranks = started(["bench.local_sgd_curves", "--steps", str(steps), "--worker", plan], 2)
    found, _ = (json.loads(process.communicate(timeout=1800)[0].splitlines()[-1]) for process in ranks)
    tokens = accumulate([float(EVERY * GLOBAL_BATCH * SEQUENCE)] * len(found["loss"]))
    spent = (tuple(tokens), tuple(found["seconds"]), tuple(found["bytes"]))
    print(plan, found["loss"][-1], round(found["seconds"][-1]), flush=True)
    return Curve(name, tuple(found["loss"]), *spent, found["waited"][0])


if __name__ == "__main__":
    main()
