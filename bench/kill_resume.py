"""Kills a training run with SIGKILL at random moments, resumes it, and compares all its losses with an unbroken run's.

    python -m bench.kill_resume [--kills 100] [--seed 0] [--write]

Two processes train a small GPT on shuffled data and save every step in the background, so that most moments fall into a
save. All processes of the run are killed at once; the next ones go on from the last checkpoint, if there is one.
"""

from __future__ import annotations

import argparse
import functools
import json
import multiprocessing
import os
import random
import shutil
import signal
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.harness import free_port, publish, torchrun

NUM_RANKS = 2
PLANS = ("data=2 zero=1", "data=2 zero=3", "tensor=2", "data=2 micro=2 recompute=layer")
LONGEST_SECONDS = 1.5  # of an attempt, after it is ready to step
START_SECONDS = 120


@dataclass
class Totals:
    """What became of the kills of one plan."""

    kills: int = 0
    in_save: int = 0  # those that found a save under way
    before_first: int = 0  # those that found no checkpoint to go on from
    repeated: int = 0  # steps that were done again
    steps: int = 0
    wrong: list[str] = field(default_factory=list)


def train(rank: int, port: int, folder: str, plan: str, last_step: int) -> None:
    """One rank: go on from the last checkpoint, save every step, and log step, loss and a checksum of the rows."""
    os.environ.update(torchrun(rank, NUM_RANKS, port))
    import torch

    import plait
    from bench.workloads import Workload, loss_fn, optimizer

    torch.set_num_threads(1)
    symbols = torch.randint(256, (56, 129), generator=torch.Generator().manual_seed(1))
    rows = [{"x": row[:-1], "y": row[1:]} for row in symbols]
    schedule = functools.partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=10_000)
    trainer = plait.Trainer(Workload(64, 2).model(), loss_fn, optimizer, plan, scheduler=schedule, clip_norm=1.0)
    data = plait.loader(rows, batch_size=8, seed=1, plan=plan)
    trainer.prepare(next(iter(plait.loader(rows, batch_size=8, seed=1, plan=plan))))
    if list(Path(folder).glob("step-*/manifest.json")):
        data.load_state_dict(trainer.load(folder)["data"])
    Path(f"{folder}-{rank}.ready").touch()
    with open(f"{folder}-{rank}.log", "a", buffering=1) as log:
        while trainer.step_number < last_step:
            for part in data:
                loss = float(trainer.step(part))
                log.write(f"{trainer.step_number} {loss.hex()} {int(part.tree['x'].sum())}\n")
                trainer.save(folder, {"data": data.state_dict()}, wait=False)
                if trainer.step_number == last_step:
                    break
    trainer.close()


def start(folder: Path, plan: str, last_step: int) -> list[Any]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch._dynamo", "plait.api.trainer", "bench.workloads"])
    port = free_port()
    for rank in range(NUM_RANKS):
        Path(f"{folder}-{rank}.ready").unlink(missing_ok=True)
    processes = [
        context.Process(target=train, args=(rank, port, str(folder), plan, last_step)) for rank in range(NUM_RANKS)
    ]
    for process in processes:
        process.start()
    return processes


def wait_ready(folder: Path, processes: list[Any]) -> None:
    end = time.monotonic() + START_SECONDS
    while not all(Path(f"{folder}-{rank}.ready").exists() for rank in range(NUM_RANKS)):
        if time.monotonic() > end or any(p.exitcode is not None for p in processes):
            raise RuntimeError(f"{folder} did not start: exit codes {[p.exitcode for p in processes]}")
        time.sleep(0.002)


def kill(processes: list[Any]) -> None:
    for process in processes:
        os.kill(process.pid, signal.SIGKILL)
    for process in processes:
        process.join()


def saving(folder: Path) -> bool:
    """Whether a file lies there that no manifest names: of a save that was not finished."""
    for found in folder.glob("step-*"):
        manifest = found / "manifest.json"
        named = set(json.loads(json.loads(manifest.read_text())["body"])["files"]) if manifest.exists() else set()
        if {path.name for path in found.iterdir()} - named - {"manifest.json"}:
            return True
    return False


def logged(folder: Path, rank: int) -> list[tuple[int, str]]:
    """(step, the rest) of each whole line."""
    text = Path(f"{folder}-{rank}.log").read_text()
    lines = [line.partition(" ") for line in text.splitlines(keepends=True) if line.count(" ") == 2]
    return [(int(step), rest) for step, _, rest in lines if rest.endswith("\n")]


def run_plan(folder: Path, plan: str, num_kills: int, moments: random.Random) -> Totals:
    total = Totals()
    run, whole = folder / "run", folder / "whole"
    while total.kills < num_kills:
        processes = start(run, plan, 1 << 30)
        try:
            wait_ready(run, processes)
            time.sleep(moments.uniform(0, LONGEST_SECONDS))
            died = [process.exitcode for process in processes if process.exitcode is not None]
            if died:
                total.wrong.append(f"{plan}: ended by itself with {died}")
                break
        finally:
            kill(processes)
        total.kills += 1
        total.in_save += saving(run)
        total.before_first += not list(run.glob("step-*/manifest.json"))
    total.steps = max(step for step, _ in logged(run, 0)) + 1
    for target in (run, whole):
        processes = start(target, plan, total.steps)
        for process in processes:
            process.join(600)
        if codes := [process.exitcode for process in processes if process.exitcode != 0]:
            total.wrong.append(f"{plan}: the last run in {target.name} ended with {codes}")
            kill([process for process in processes if process.exitcode is None])
    for rank in range(NUM_RANKS):
        expected, found = dict(logged(whole, rank)), logged(run, rank)
        total.wrong += [f"{plan}: rank {rank}, step {step}" for step, rest in found if rest != expected.get(step)]
        missing = expected.keys() - {step for step, _ in found}
        total.wrong += [f"{plan}: rank {rank}, step {step} is missing" for step in missing]
        if rank == 0:
            total.repeated = sum(Counter(step for step, _ in found).values()) - len(expected)
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100, help="in all")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--write", action="store_true", help="keep the table in docs/bench/")
    given = parser.parse_args()
    moments = random.Random(given.seed)
    rows, wrong = [], []
    for index, plan in enumerate(PLANS):
        folder = Path(tempfile.mkdtemp(prefix="plait-kill-", dir="/var/tmp"))
        num = given.kills // len(PLANS) + (index < given.kills % len(PLANS))
        try:
            total = run_plan(folder, plan, num, moments)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        wrong += total.wrong
        verdict = "all" if not total.wrong else f"{len(total.wrong)} differ"
        rows.append(
            f"| {plan} | {total.kills} | {total.in_save} | {total.before_first} | {total.steps} | {total.repeated} |"
            f" {verdict} |"
        )
    head = "| plan | kills | in a save | before the first | steps | done again | losses and rows as unbroken |"
    body = [
        "SIGKILL of both processes at random moments, while every step is saved in the background. Every loss (all its"
        " bits) and the rows of every step, those done again too, are compared with a run that was never killed.",
        "\n".join([head, "|---|---|---|---|---|---|---|", *rows]),
        *(["Differences:\n\n" + "\n".join(wrong)] if wrong else []),
    ]
    publish("Killed and resumed", "\n\n".join(body), "kill_resume", given.write)
    raise SystemExit(1 if wrong else 0)


if __name__ == "__main__":
    main()
