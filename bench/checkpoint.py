"""What a save in the background costs a step, and how fast saving and loading are beside the disk itself (dd).

    python -m bench.checkpoint [small wide] [--rounds 9] [--steps 6] [--write]

The same processes take their steps with and without a save, in turn. dd reads and writes as many bytes, past the page
cache (oflag=direct, iflag=direct), right before and after; loads find none of their files in the page cache.
"""

from __future__ import annotations

import os
import re
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench import variants
from bench.harness import Group, Variant, arguments, publish
from bench.workloads import WORKLOADS, Workload
from plait.engine.checkpoint.checkpoint_folders import check_files, newest

PLANS = ("data=2", "data=2 zero=1", "data=2 zero=3")
LARGE = Workload(1024)  # 102 million parameters: 1.1 GiB with the state of AdamW
FOLDER = "/var/tmp"  # on a disk, where /tmp may lie in memory
PAUSE_SECONDS = 1.0  # for the disk's own caches to empty


def timed_steps(step: Any, folder: str, num_steps: int, save: bool) -> tuple[list[float], float]:
    """Seconds of each step, the first one with the call of a save; and after how many the save was done."""
    found = []
    begin = time.perf_counter()
    for index in range(num_steps):
        start = time.perf_counter()
        if save and index == 0:
            step.trainer.save(folder, keep=1, wait=False)
        step()
        found.append(time.perf_counter() - start)
    step.trainer._saver.wait()
    return found, time.perf_counter() - begin


def saved(step: Any, folder: str) -> tuple[float, int]:
    """Seconds to save, and the bytes of the whole checkpoint."""
    step.trainer.world.everyone().barrier()
    start = time.perf_counter()
    step.trainer.save(folder, keep=1)
    seconds = time.perf_counter() - start
    return seconds, _bytes(folder)


def loaded(step: Any, folder: str) -> float:
    """Seconds to load; none of the files are in memory before."""
    checkpoint = newest(folder)
    for name in check_files(checkpoint).files:
        with open(f"{checkpoint}/{name}", "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    step.trainer.world.everyone().barrier()
    start = time.perf_counter()
    step.trainer.load(folder)
    return time.perf_counter() - start


def large(plan: str) -> Callable[[], Any]:
    WORKLOADS["large"] = LARGE
    step = variants.PlaitStep("large", plan, shared_memory=True)
    step()
    return step


def disk(arguments: str, num_bytes: int) -> float:
    """Bytes a second that dd reports."""
    command = f"dd {arguments} bs=16M count={num_bytes >> 24}"
    said = subprocess.run(command.split(), capture_output=True, text=True, check=True, env={"LC_ALL": "C"}).stderr
    match = re.search(r"(\d+) bytes .* copied, ([\d.]+) s", said)
    assert match is not None, said
    return int(match[1]) / float(match[2])


def cost_table(workload: str, plan: str, folder: str, rounds: int, steps: int) -> str:
    """One row: what a save adds to the step in which it is taken, and to all steps while it is written."""
    group = Group(Variant(plan, variants.plait, (workload, plan)))
    try:
        group.turn(3)
        group.call(timed_steps, folder, steps, True)  # makes the host buffers
        first, total, done, plain_ms = [], [], [], []
        for _ in range(rounds):
            plain = [found for found, _ in group.call(timed_steps, folder, steps, False)]
            with_save = group.call(timed_steps, folder, steps, True)
            usual = statistics.median(seconds for rank in plain for seconds in rank)
            first.append(max(found[0] for found, _ in with_save) / usual - 1)
            total.append((max(sum(found) for found, _ in with_save) - max(map(sum, plain))) / usual)
            done.append(max(seconds for _, seconds in with_save) / usual)
            plain_ms.append(usual * 1e3)
    finally:
        group.close()
    return (
        f"| {workload} | {plan} | {statistics.median(plain_ms):.0f} | {_spread(first)} | {_spread(total)} |"
        f" {_bytes(folder) / 2**20:.0f} |"
    )


def speed_rows(plan: str, num_ranks: int, folder: str, rounds: int) -> list[str]:
    group = Group(Variant(plan, large, (plan,), num_ranks=num_ranks))
    probe = Path(folder) / "dd"
    writes, reads, write_rates, read_rates = [], [], [], []
    try:
        for _ in range(rounds):
            time.sleep(PAUSE_SECONDS)
            found = group.call(saved, f"{folder}/large")
            seconds, num_bytes = max(s for s, _ in found), found[0][1]
            time.sleep(PAUSE_SECONDS)
            rate = disk(f"if=/dev/zero of={probe} oflag=direct conv=fsync", num_bytes)
            write_rates.append(num_bytes / seconds)
            writes.append(num_bytes / seconds / rate)
            time.sleep(PAUSE_SECONDS)
            seconds = max(group.call(loaded, f"{folder}/large"))
            time.sleep(PAUSE_SECONDS)
            rate = disk(f"if={probe} of=/dev/null iflag=direct", num_bytes)
            read_rates.append(num_bytes / seconds)
            reads.append(num_bytes / seconds / rate)
    finally:
        group.close()
        probe.unlink(missing_ok=True)
    name = plan or "one device"
    return [
        f"| {what} | {name} | {statistics.median(rates) / 1e6:.0f} | {_spread(ratios)} |"
        for what, rates, ratios in (("save", write_rates, writes), ("load", read_rates, reads))
    ]


def _spread(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def _bytes(folder: str) -> int:
    return sum(entry.bytes for entry in check_files(newest(folder)).files.values())


def main() -> None:
    given = arguments(__doc__, WORKLOADS)
    folder = tempfile.mkdtemp(prefix="plait-bench-", dir=FOLDER)
    try:
        costs = [
            cost_table(workload, plan, f"{folder}/{workload}", given.rounds, given.steps)
            for workload in given.workloads
            for plan in PLANS
        ]
        speeds = [
            row
            for plan, num_ranks in (("", 1), ("data=2 zero=1", 2), ("data=2 zero=3", 2))
            for row in speed_rows(plan, num_ranks, folder, given.rounds)
        ]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    body = [
        "A save with wait=False, in parts of a step's time: what it adds to the step in which it is taken (to reach:"
        f" below 0.10), and to that and the {given.steps - 1} steps after it together, during which it is written.",
        "| workload | plan | ms/step | first step | all together | MiB |\n|---|---|---|---|---|---|\n"
        + "\n".join(costs),
        "Saving and loading 102 million parameters with the state of AdamW, beside dd (to reach: 0.70 of it).",
        "| | plan | MB/s | of dd |\n|---|---|---|---|\n" + "\n".join(speeds),
    ]
    publish("Checkpoints", "\n\n".join(body), "checkpoint", given.write)


if __name__ == "__main__":
    main()
