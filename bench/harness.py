"""Times variants of one job against each other: every variant is a group of processes that stays alive between turns.

A round gives each variant one turn, A B C A B C ..., so that what else the machine does falls on all of them alike;
what counts is the ratio within a round. Memory is measured apart, in fresh processes.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import datetime
import gc
import multiprocessing
import os
import platform
import re
import resource
import socket
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent.parent / "docs" / "bench"
START_SECONDS = 600  # a group that has not started by then never will
TURN_SECONDS = 600


@dataclass(frozen=True)
class Variant:
    """One way to do the job. `build(*args)` runs in every process and returns the step; both see torchrun's variables.

    A step returns nothing that is looked at. `env` is set before the process starts.
    """

    name: str
    build: Callable[..., Callable[[], Any]]
    args: tuple[Any, ...] = ()
    num_ranks: int = 2
    env: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Turn:
    """What one rank measured over one turn: seconds a step, of a clock and of all its threads, and page faults."""

    seconds: float
    cpu: float
    faults: float


@dataclass(frozen=True)
class Memory:
    """Resident MiB of one rank: the peak over its whole life, the peak over steps other than the first, what it had
    before any step, and what it has between steps, with unused memory given back. What is above that the steps need;
    below it are parameters, optimizer state and all code that is loaded."""

    life: float
    steps: float
    start: float
    rest: float


class Group:
    """The processes of one variant. Between turns they block on a pipe and use no processor time."""

    def __init__(self, variant: Variant) -> None:
        self.variant = variant
        context = multiprocessing.get_context("spawn")
        port = free_port()
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(variant.num_ranks):
            here, there = context.Pipe()
            with _environment(torchrun(rank, variant.num_ranks, port) | variant.env):
                process = context.Process(target=_serve, args=(there, variant), daemon=True)
                process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)
        self._receive(START_SECONDS)

    def turn(self, num_steps: int) -> list[Turn]:
        """Run that many steps on every rank."""
        return self._ask(("turn", num_steps))

    def memory(self, num_steps: int) -> list[Memory]:
        return self._ask(("memory", num_steps))

    def call(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """`function(step, *args)` on every rank: for what a turn does not measure."""
        return self._ask(("call", function, args))

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(5)
            if process.is_alive():
                process.kill()

    def _ask(self, message: tuple[Any, ...]) -> list[Any]:
        for pipe in self._pipes:
            pipe.send(message)
        return self._receive(TURN_SECONDS)

    def _receive(self, seconds: float) -> list[Any]:
        answers = []
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(seconds):
                raise TimeoutError(f"{self.variant.name}: rank {rank} gave no answer in {seconds} s")
            try:
                answers.append(pipe.recv())
            except EOFError:
                raise RuntimeError(f"{self.variant.name}: rank {rank} died; its error is above") from None
        return answers


@dataclass(frozen=True)
class Result:
    """Of one variant: seconds a step, round by round (mean over ranks), processor seconds of a rank, and the peak
    memory of its fullest rank."""

    name: str
    seconds: list[float]
    cpu: float
    faults: float
    memory: Memory | None

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    def ratios(self, base: Result) -> list[float]:
        """This variant's time over `base`'s, round by round."""
        return [mine / other for mine, other in zip(self.seconds, base.seconds, strict=True)]


def compare(variants: Sequence[Variant], num_rounds: int, num_steps: int, memory: bool = True) -> list[Result]:
    """Time the variants in alternating turns of `num_steps` steps, then each one's memory in fresh processes."""
    groups = []
    try:
        for variant in variants:
            groups.append(Group(variant))
            groups[-1].turn(2)  # warm up
        rounds = [[group.turn(num_steps) for group in groups] for _ in range(num_rounds)]
    finally:
        for group in groups:
            group.close()
    peaks = [peak(variant) if memory else None for variant in variants]
    return [
        Result(
            variant.name,
            [statistics.fmean(turn.seconds for turn in turns[i]) for turns in rounds],
            statistics.median(turn.cpu for turns in rounds for turn in turns[i]),
            statistics.median(turn.faults for turns in rounds for turn in turns[i]),
            peaks[i],
        )
        for i, variant in enumerate(variants)
    ]


def table(results: Sequence[Result], bases: Sequence[str]) -> str:
    """Markdown: one row a variant; ratios to each base are `median (min-max)` over rounds."""
    by_name = {result.name: result for result in results}
    ratios_to = [f"time / {base}" for base in bases]
    head = ["variant", "ms/step", "CPU ms/step", *ratios_to, "faults/step", "peak MiB (steps, above rest)"]
    lines = [head, ["---"] * len(head)]
    for result in results:
        ratios = [result.ratios(by_name[base]) for base in bases]
        lines.append([
            result.name,
            f"{result.median * 1e3:.1f}",
            f"{result.cpu * 1e3:.1f}",
            *(f"{statistics.median(r):.3f} ({min(r):.3f}-{max(r):.3f})" for r in ratios),
            f"{result.faults:.0f}",
            _memory_text(result.memory) if result.memory else "",
        ])  # fmt: skip
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _memory_text(memory: Memory) -> str:
    return f"{memory.life:.0f} ({memory.steps:.0f}, +{memory.steps - memory.rest:.0f})"


def publish_comparison(
    doc: str | None,
    title: str,
    targets: str,
    workloads: Iterable[str],
    contenders: Callable[[str], Sequence[Variant]],
    bases: Sequence[str],
    name: str,
) -> None:
    """The whole of a benchmark that compares contenders, workload by workload: command line, turns, a table of each."""
    given = arguments(doc, workloads)
    parts = []
    for workload in given.workloads:
        results = compare(contenders(workload), given.rounds, given.steps)
        parts.append(f"## {workload}\n\n{table(results, bases)}")
    publish(title, "\n\n".join([targets, *parts]), name, given.write)


def machine() -> str:
    """One line: processor, cores, Python and torch, date."""
    import torch

    model = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    name = model[1] if model else platform.processor()
    today = datetime.date.today().isoformat()
    return f"{name}, {os.cpu_count()} cores; Python {platform.python_version()}, torch {torch.__version__}; {today}"


def publish(title: str, body: str, name: str, write: bool) -> None:
    """Print a finished table; with `write` also keep it as docs/bench/<name>.md."""
    text = f"# {title}\n\n{machine()}\n\n{body}\n"
    print(text)
    if write:
        path = DOCS / f"{name}.md"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        print(f"written to {path}")


def peak(variant: Variant) -> Memory:
    """Of the fullest of its ranks, in fresh processes."""
    group = Group(variant)
    try:
        peaks = group.memory(4)
    finally:
        group.close()
    return Memory(*(max(column) for column in zip(*map(dataclasses.astuple, peaks), strict=True)))


def _serve(pipe: Connection, variant: Variant) -> None:
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    step = variant.build(*variant.args)
    pipe.send("ready")
    while True:
        try:
            kind, *rest = pipe.recv()
        except EOFError:  # the benchmark is over
            return
        if kind == "turn":
            pipe.send(_turn(step, *rest))
        elif kind == "memory":
            pipe.send(_memory(step, *rest))
        else:
            function, args = rest
            pipe.send(function(step, *args))


def _turn(step: Callable[[], Any], num_steps: int) -> Turn:
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    start, cpu = time.perf_counter(), time.process_time()
    for _ in range(num_steps):
        step()
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults
    return Turn(seconds / num_steps, cpu / num_steps, faults / num_steps)


def _memory(step: Callable[[], Any], num_steps: int) -> Memory:
    start = _high_water()
    step()
    life = _high_water()
    gc.collect()
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)
    rest = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM; ru_maxrss would count the parent's memory
    for _ in range(num_steps):
        step()
    steps = _high_water()
    return Memory(max(life, steps), steps, start, rest)


def _high_water() -> float:
    return _status("VmHWM")


def _status(name: str) -> float:
    """MiB of a line of this process's status."""
    found = re.search(rf"{name}:\s*(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) / 1024


def torchrun(rank: int, size: int, port: int) -> dict[str, str]:
    """The variables that torchrun would set, for ranks of one host that use no accelerator."""
    world = {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1"}
    return world | {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }  # fmt: skip


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    old = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in old.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def arguments(doc: str | None, workloads: Iterable[str] = ()) -> argparse.Namespace:
    """The command line that benchmarks share."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    if workloads:
        parser.add_argument("workloads", nargs="*", metavar="WORKLOAD", help=f"of {', '.join(workloads)}; default: all")
        parser.add_argument("--rounds", type=int, default=9, help="turns of each variant")
        parser.add_argument("--steps", type=int, default=3, help="steps a turn")
    parser.add_argument("--write", action="store_true", help="keep the table in docs/bench/")
    given = parser.parse_args()
    if workloads:
        given.workloads = given.workloads or list(workloads)
        if unknown := set(given.workloads) - set(workloads):
            parser.error(f"unknown workload {', '.join(sorted(unknown))}; there are {', '.join(workloads)}")
    return given
