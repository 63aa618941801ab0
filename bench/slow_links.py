"""Training across slow networks: ranks in network namespaces, joined by links of a given speed (scripts/slow-links).

python -m bench.slow_links [--ranks 2 4] [--rounds 3] [--write]

Needs root, iproute2 and a kernel with tbf. Each rank is a process of one thread in a namespace of its own; plait does
not use shared memory here. Of what agrees every N steps, a step is N local ones and one exchange over N.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import plait
from bench.harness import free_port, publish
from bench.workloads import GLOBAL_BATCH, SEQUENCE, WORKLOADS, loss_fn, optimizer
from plait import Plan, Trainer
from plait.comm.process_world import process_world
from plait.cost.transformer_states import Owned, exchange_time
from plait.plan.parallelism import Parallelism
from plait.spec.cluster import Cluster, DeviceSpec, LinkSpec

RATES = ("", "1gbit", "100mbit")
STEPS = 4
CONTENDERS = {
    "torch DDP": "",
    "plait data=N": "data={n}",
    "local SGD, sync=8": "data={n} sync=8",
    "DiLoCo, sync=64": "data={n} sync=64 outer=nesterov",
    "DiLoCo, int8": "data={n} sync=64 outer=nesterov compress=int8",
    "no exchange at all": "data={n} sync=1000000",
    "compress=powersgd:2": "data={n} compress=powersgd:2",
    "compress=int8": "data={n} compress=int8",
}
TEXT = """The small GPT, a global batch of 8 sequences of 128 bytes, so that with twice the ranks each has half the
rows; 2 cores, which 4 ranks share. Tokens a second, over those of torch DDP in the same round: median (min-max) of
{rounds} rounds. To reach at 100 Mbit/s and 2 ranks: DiLoCo 8, compress=powersgd:2 6. No strategy can do more than ranks
that never exchange anything, which is one of the rows."""
ALONE = "no exchange at all"
PREDICTED = """Tokens a second, predicted over measured: what ranks without any exchange take is measured, and what
others send and what that takes on such a link is predicted, and below it what the planner takes for the fastest plan.
No strategy can be faster than ranks without exchange: where one was measured so, that is the machine."""
SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "slow-links"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker is not None:
        print(json.dumps(measure(given.worker, given.rounds)), flush=True)
        os._exit(0)
    if os.geteuid() != 0 or shutil.which("tc") is None:
        print("skipped: network namespaces with shaped links need root and iproute2 (ip, tc)")
        return
    parts = [TEXT.format(rounds=given.rounds)]
    for num in given.ranks:
        rows = ["| | " + " | ".join(rate or "unshaped" for rate in RATES) + " |", "| --- " * (len(RATES) + 1) + "|"]
        cells: dict[str, list[str]] = {name: [] for name in CONTENDERS}
        speeds: dict[str, dict[str, float]] = {rate: {} for rate in RATES}
        for rate in RATES:
            subprocess.run([SCRIPT, "up", str(num), *([rate] if rate else [])], check=True)
            try:
                rounds = rounds_of(num, given.rounds)
            finally:
                subprocess.run([SCRIPT, "down"], check=True)
            for name, column in cells.items():
                ratios = [each["torch DDP"] / each[name] for each in rounds]
                rate_of = GLOBAL_BATCH * SEQUENCE / statistics.median(each[name] for each in rounds)
                speeds[rate][name] = rate_of
                column.append(
                    f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f}), {rate_of:,.0f}/s"
                )
                print(num, rate or "unshaped", name, column[-1], flush=True)
        rows += [f"| {name} | {' | '.join(column)} |" for name, column in cells.items()]
        parts.append(f"## {num} ranks\n\n" + "\n".join(rows))
        parts.append(f"### {num} ranks, predicted\n\n{PREDICTED}\n\n" + "\n".join(predicted_rows(num, speeds)))
    publish("Slow links", "\n\n".join(parts), "slow_links", given.write)


def cluster_of(num: int, rate: str, tokens_per_second: float) -> Cluster:
    """So many ranks with a core each over links of a rate, which without exchanges have so many tokens per second."""
    bandwidth = {"1gbit": 125e6, "100mbit": 12.5e6}[rate]
    device = DeviceSpec("core", (("float32", 1e11),), 1e10, 1e10, overlaps=False)
    workload, free = WORKLOADS["small"], LinkSpec("site", 0.0, 1e10)
    cluster = Cluster("namespaces", num, device, (free,))
    one = plait.simulate(workload.model(), loss_fn, workload.batch(), f"data={num}", cluster, memory=False).seconds
    scaled = dataclasses.replace(device, in_step=GLOBAL_BATCH * SEQUENCE / tokens_per_second / one)
    return dataclasses.replace(cluster, device=scaled, links=(LinkSpec("site", 1e-4, bandwidth),))


def predicted_rows(num: int, speeds: dict[str, dict[str, float]]) -> list[str]:
    """A table of predicted over measured tokens a second, by strategy and rate, and of the planner's plans."""
    rates = [rate for rate in RATES if rate]
    rows = ["| | " + " | ".join(rates) + " |", "| --- " * (len(rates) + 1) + "|"]
    clusters = {rate: cluster_of(num, rate, speeds[rate][ALONE]) for rate in rates}
    workload = WORKLOADS["small"]
    model, batch = workload.model(), workload.batch()
    for name, text in CONTENDERS.items():
        plan = Plan.parse(text.format(n=num)) if text else None
        if plan is None or name == ALONE or (plan.relaxed_axis and plan.sync == 1):
            continue  # gradients that are compressed at each step take time of the cores, which is not predicted
        cells = []
        for rate in rates:
            seconds = GLOBAL_BATCH * SEQUENCE / speeds[rate][ALONE]
            if plan.relaxed_axis:
                assert isinstance(plan.sync, int)
                own = Owned(sum(p.numel() for p in model.parameters()))
                seconds += exchange_time(own, Parallelism.of(plan), clusters[rate]) / plan.sync
            else:
                seconds = plait.simulate(model, loss_fn, batch, plan, clusters[rate], memory=False).seconds
            said = GLOBAL_BATCH * SEQUENCE / seconds
            cells.append(f"{said:,.0f} / {speeds[rate][name]:,.0f}: {said / speeds[rate][name] - 1:+.0%}")
        rows.append(f"| {name} | {' | '.join(cells)} |")
    picked = [
        plait.search(model, loss_fn, batch, cluster, optimizer=optimizer)[0].plan for cluster in clusters.values()
    ]
    return [*rows, f"| the planner's | {' | '.join(f'`{plan}`' for plan in picked)} |"]


def rounds_of(num: int, rounds: int) -> list[dict[str, float]]:
    """By contender the seconds of a step, of the slowest rank: of several rounds, in which all take turns."""
    ranks = started(["bench.slow_links", "--rounds", str(rounds), "--worker", str(num)], num)
    found = [json.loads(process.communicate(timeout=1200)[0].splitlines()[-1]) for process in ranks]
    return [{name: max(rank[i][name] for rank in found) for name in CONTENDERS} for i in range(rounds)]


def started(arguments: list[str], num: int) -> list[subprocess.Popen[str]]:
    """A module as so many ranks, each in the namespace of its number."""
    port = free_port()
    ranks = []
    for rank in range(num):
        env = os.environ | {
            "RANK": str(rank), "WORLD_SIZE": str(num), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": "10.77.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
        }  # fmt: skip
        command = ["ip", "netns", "exec", f"plait-{rank}", sys.executable, "-m", *arguments]
        ranks.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True))
    return ranks


def measure(num: int, rounds: int) -> list[dict[str, float]]:
    """In a rank."""
    torch.set_num_threads(1)
    timers = {name: _timer(plan.format(n=num)) for name, plan in CONTENDERS.items()}
    found = [{name: timer() for name, timer in timers.items()} for _ in range(rounds + 1)]
    return found[1:]  # in the first, steps are captured and buffers made


def _timer(plan: str) -> Callable[[], float]:
    """What trains a few steps and returns the seconds of one."""
    workload = WORKLOADS["small"]
    if not plan:
        from bench.variants import torch_ddp

        step = torch_ddp("small")
        return lambda: _timed(step, STEPS)
    chosen = Plan.parse(plan)
    timed = chosen if chosen.sync == 1 else dataclasses.replace(chosen, sync=10**6)  # agrees when it is told to
    trainer = Trainer(workload.model(), loss_fn, optimizer, timed, world=process_world(timed.mesh, shared_memory=False))
    batch = workload.batch()

    def train() -> float:
        each = _timed(lambda: float(trainer.step(batch)), STEPS)
        if chosen.sync == 1:
            return each
        assert isinstance(chosen.sync, int)
        return each + _timed(trainer.agree, 1, before=lambda: trainer.step(batch)) / chosen.sync

    return train


def _timed(step: Callable[[], Any], num: int, before: Callable[[], Any] | None = None) -> float:
    if before is not None:
        before()
    step()
    total = 0.0
    for _ in range(num):
        if before is not None:
            before()
        start = time.perf_counter()
        step()
        total += time.perf_counter() - start
    return total / num


if __name__ == "__main__":
    main()
