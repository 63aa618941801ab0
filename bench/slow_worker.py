"""One worker is three times as slow: steps and seconds to the loss that the synchronous run ends with.

python -m bench.slow_worker [--workers 2 4] [--steps 120] [--keep FOLDER] [--write]

The slow one is stopped for 0.2 of every 0.3 seconds by signals, from when all have joined. Of the folders that --keep
leaves, `plait compare` draws the curves.
"""

from __future__ import annotations

import argparse
import functools
import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

from bench.harness import publish
from bench.staleness import batch, symbols
from bench.workloads import GLOBAL_BATCH, WORKLOADS, loss_fn
from plait.api.job.metrics import METRICS, MetricsLog, read_steps
from plait.integrations.ray_servers.messages import Progress
from plait.integrations.ray_servers.ray_cluster import load_ray, started_here
from plait.integrations.ray_servers.server_job import make_job
from plait.integrations.ray_servers.supervisor import RunSupervisor
from plait.plan.plan import Plan

MODES = {
    "synchronous": "staleness=0",
    "synchronous, a backup worker": "staleness=0 backup=1",
    "bounded": "staleness=4",
    "asynchronous": "",
    "local SGD, rounds of 8": "staleness=0 sync=8",
}
BATCH = 12  # rows, which split over 1, 2, 3 and 4 workers
SMOOTHED = 16  # steps over which a loss is averaged
WARMUP = 20
TEXT = """The small GPT on Python's own source text, 1 server, AdamW (lr 3e-4, {warmup} steps of warm-up), steps of
{batch} sequences of 128 bytes that are drawn anew each time. Of every mode: the steps, and the seconds since the first
one, at which the mean loss of the last {smoothed} steps is first at most that of the synchronous run after {steps}
steps. To reach: fewer seconds than the synchronous run for the asynchronous one."""


class Sequences(Dataset[dict[str, torch.Tensor]]):
    def __init__(self) -> None:
        self._text = symbols()

    def __len__(self) -> int:
        return GLOBAL_BATCH * 10_000

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {key: rows[0] for key, rows in batch(self._text, index, 1).items()}


def make_model() -> tuple[torch.nn.Module, Any]:
    return WORKLOADS["small"].model(), loss_fn


def make_data() -> tuple[Any, Any]:
    return Sequences(), None


def make_log(out: str, first_step: int) -> MetricsLog:
    return MetricsLog(Path(out), first_step)


def warmed(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / WARMUP))


@contextmanager
def slowed(pid: int) -> Iterator[threading.Event]:
    """The process runs for a third of the time, once the event is set."""
    begin, over = threading.Event(), threading.Event()

    def go() -> None:
        begin.wait()
        with suppress(ProcessLookupError):  # it ends with the run
            while not over.is_set():
                os.kill(pid, signal.SIGSTOP)
                over.wait(0.2)
                os.kill(pid, signal.SIGCONT)
                over.wait(0.1)

    thread = threading.Thread(target=go)
    thread.start()
    try:
        yield begin
    finally:
        over.set()
        begin.set()
        thread.join()


def curve(ray: Any, plan: str, steps: int, target: float, keep: Path | None) -> list[tuple[int, float, float]]:
    """(step, seconds since the first was done, loss) of every step; it ends early where the target is reached."""
    with tempfile.TemporaryDirectory(prefix="plait-bench-") as out:
        job = make_job(
            Plan.parse(plan), make_model=make_model, make_data=make_data, num_items=len(Sequences()), steps=steps,
            optimizer=functools.partial(torch.optim.AdamW, lr=3e-4), scheduler=warmed, batch_size=BATCH, out=out,
            folder=f"{out}/checkpoints", make_log=functools.partial(make_log, out),
        )  # fmt: skip
        running = RunSupervisor(ray, job)
        try:
            pid = ray.get(running.workers[0][0].pid.remote())
            with slowed(pid) as begin:

                def show(progress: Progress) -> None:
                    if progress.step:
                        begin.set()

                end = running.wait(show, lambda: reached(lines_of(out), target) is not None)
        finally:
            running.close()
        assert not end.error, end.error
        if keep is not None:
            keep.mkdir(parents=True, exist_ok=True)
            shutil.copy(Path(out) / METRICS, keep)
        return lines_of(out)


def lines_of(out: str) -> list[tuple[int, float, float]]:
    seconds, found = 0.0, []
    for number, line in enumerate(read_steps(Path(out) / METRICS)):
        seconds += line["seconds"] if number else 0.0
        found.append((line["step"], seconds, line["loss"]))
    return found


def smoothed(lines: list[tuple[int, float, float]]) -> list[tuple[int, float, float]]:
    """The same with mean losses over SMOOTHED steps, from where there are as many."""
    found = []
    for step, seconds, _ in lines:
        some = [loss for at, _, loss in lines if step - SMOOTHED < at <= step]
        if step >= SMOOTHED:
            found.append((step, seconds, sum(some) / len(some)))
    return found


def reached(lines: list[tuple[int, float, float]], target: float) -> tuple[int, float] | None:
    """The step, and the seconds, at which the smoothed loss is first at most the target."""
    return next(((step, seconds) for step, seconds, loss in smoothed(lines) if loss <= target), None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--keep", type=Path, help="the folder for the runs' metrics")
    parser.add_argument("--write", action="store_true", help="keep the result in docs/bench/")
    given = parser.parse_args()
    rows = [
        "| workers | mode | loss to reach | steps | seconds | of the synchronous run's | s/step |",
        "|---|---|---|---|---|---|---|",
    ]
    with started_here(load_ray(), 12, 512 << 20) as ray:
        for workers in given.workers:
            target = whole = 0.0
            for mode, rest in MODES.items():
                plan = f"workers={workers} servers=1 {rest}"
                keep = None if given.keep is None else given.keep / f"{workers} workers, {mode}"
                lines = curve(ray, plan, 2 * given.steps if target else given.steps, target, keep)
                if not target:
                    whole, target = smoothed(lines)[-1][1:]
                at = reached(lines, target)
                pace = lines[-1][1] / (lines[-1][0] - lines[0][0])
                took = "not reached | - | -" if at is None else f"{at[0]} | {at[1]:.0f} | {at[1] / whole:.2f}"
                rows.append(f"| {workers} | {mode} | {target:.3f} | {took} | {pace:.2f} |")
                print(rows[-1], flush=True)
    text = TEXT.format(warmup=WARMUP, batch=BATCH, smoothed=SMOOTHED, steps=given.steps)
    publish("A slow worker", text + "\n\n" + "\n".join(rows), "slow_worker", given.write)


if __name__ == "__main__":
    main()
