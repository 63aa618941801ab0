"""What the ranks of bench.local_truth do: they train under all plans in turn, and measure calls and collectives."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import nn

from bench.call_measurement import distinct_calls, measure_calls, measure_updates
from bench.harness import free_port, torchrun
from bench.truth_models import MODELS
from bench.workloads import optimizer
from plait import Plan, Trainer
from plait.api.simulate_step import describe_program
from plait.cost.collective_time import CollectiveKind
from plait.cost.step_program import StepProgram
from plait.engine.compiler import Captures, Compiler
from plait.engine.setup_checks import check_plan, check_step
from plait.errors import PlaitError
from plait.spec.cluster import CallTime, CollectiveTime

CORES = len(os.sched_getaffinity(0))
_SIZES = tuple(1 << power for power in (10, 13, 16, 18, 20, 21, 22, 23, 24))  # bytes of collectives
_RUNS = 10
_AT_ONCE, _PAUSE = 12, 0.2  # calls that are measured without a pause, and its seconds


@dataclass
class Measured:
    """What is known of the machine, of the same run. Seconds are in units of `reference`, measured at the same time."""

    calls: list[CallTime]
    collectives: list[CollectiveTime]
    together: list[tuple[int, float]]
    messages: list[tuple[int, float]]  # of a send: bytes, seconds
    step_seconds: float
    view_seconds: float


class Lowered:
    """The steps of one model under several plans, lowered once for all ranks, which are forked from this process."""

    def __init__(self, model: str, plans: Sequence[str]) -> None:
        self.given = MODELS[model]
        self.batch = self.given.batch()
        captures = Captures(self.given.model(), self.given.loss_fn, torch.device("cpu"))
        self.compilers: dict[str, Compiler] = {}
        self.refused: dict[str, str] = {}
        self.programs: dict[str, StepProgram] = {}
        for text in plans:
            plan = Plan.parse(text)
            compiler = Compiler(captures, plan)
            try:
                check_plan(plan, captures.model, None)
                program = check_step(compiler, self.batch, plan, None, optimizer).program
            except PlaitError as error:
                self.refused[text] = str(error)
                continue
            self.compilers[text] = compiler
            self.programs[text] = describe_program(program, self.batch, optimizer)

    def trainer(self, plan: str) -> Trainer:
        """A trainer with a model of its own."""
        model, known = self.given.model(), self.compilers[plan]
        captures = Captures(model, self.given.loss_fn, torch.device("cpu"))
        captures._found = known.captures._found
        captures.changes, captures.changing = known.captures.changes, known.captures.changing
        compiler = Compiler(captures, known.plan)
        compiler._found, compiler._settled = known._found, known._settled
        return Trainer(model, self.given.loss_fn, optimizer, plan, compiler=compiler)


class Candidates:
    """Trainers of one model under several plans, on one rank."""

    def __init__(self, lowered: Lowered) -> None:
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.batch = lowered.batch
        self.trainers: dict[str, Trainer] = {}
        for plan in lowered.compilers:
            self.trainers[plan] = lowered.trainer(plan)
            self.trainers[plan].step(self.batch)
        self.tiny = Trainer(nn.Linear(8, 8), lambda model, batch: model(batch).sum(), optimizer, f"data={self.size}")
        for _ in range(3):
            self.tiny.step(torch.ones(8, 8))


class Ranks:
    """Processes that are ranks, forked from this one. Between calls they block on a pipe."""

    def __init__(self, lowered: Lowered, size: int) -> None:
        context, port = multiprocessing.get_context("fork"), free_port()
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(size):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(there, lowered, torchrun(rank, size, port)), daemon=True)
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)

    def call(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """`function(candidates, *args)` on every rank."""
        for pipe in self._pipes:
            pipe.send((function, args))
        return [pipe.recv() for pipe in self._pipes]

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:  # they have nothing to save
            process.kill()
            process.join()


def _serve(pipe: Connection, lowered: Lowered, variables: dict[str, str]) -> None:
    os.environ.update(variables)
    torch.set_num_threads(1)
    state = Candidates(lowered)
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            return
        pipe.send(function(state, *args))


def ready(state: Candidates) -> bool:
    return True


_LEFT, _LONG = torch.ones(384, 384), torch.ones(1 << 19)


def reference() -> float:
    """Seconds of some work that is always the same: how fast a processor is changes from moment to moment. The median
    of several runs, or one that something else interrupts would count for a whole turn."""
    times = []
    for _ in range(9):
        begin = time.perf_counter()
        for _ in range(6):
            _LEFT @ _LEFT
            _LONG + _LONG
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


class Clock:
    """Times in units of the reference, measured before and after."""

    def __init__(self) -> None:
        reference()
        self._before = reference()
        self.unit = self._before

    def done(self) -> None:
        self.unit = (self._before + reference()) / 2


def turn(state: Candidates, plan: str, steps: int) -> tuple[float, float]:
    """Seconds of a step under a plan, the mean of several that follow each other; and of the reference."""
    trainer = state.trainers[plan]
    with _first():
        clock = Clock()
        trainer.step(state.batch)
        begin = time.perf_counter()
        for _ in range(steps):
            trainer.step(state.batch)
        seconds = (time.perf_counter() - begin) / steps
        clock.done()
    return seconds, clock.unit


def machine(state: Candidates) -> Measured:
    """Measure the machine: on as many ranks as there are cores the calls, on all of them collectives."""
    found = [_program(one) for one in state.trainers.values()]
    calls: list[CallTime] = []
    everyone = state.tiny.engine.world.everyone()
    if state.rank < CORES:
        device, nodes = torch.device("cpu"), [*distinct_calls(found).items()]
        for at in range(0, len(nodes), _AT_ONCE):
            with _first():
                clock = Clock()
                some = measure_calls(dict(nodes[at : at + _AT_ONCE]), device)
                clock.done()
            calls += [replace(call, seconds=call.seconds / clock.unit) for call in some]
            time.sleep(_PAUSE)
        with _first():
            clock = Clock()
            some = measure_updates(found, optimizer, device)
            clock.done()
        calls += [replace(call, seconds=call.seconds / clock.unit) for call in some]
    everyone.barrier()
    collectives = _collectives(state)
    with _first():
        together = _together(state)
        clock = Clock()
        messages = _messages(state)
        everyone.barrier()
        times, ones = [], torch.ones(8, 8)
        for _ in range(30):
            begin = time.perf_counter()
            state.tiny.step(ones)
            times.append(time.perf_counter() - begin)
        view = _seconds(lambda: ones.view(64))
        clock.done()
    messages = [(size, seconds / clock.unit) for size, seconds in messages]
    step = statistics.median(times) / clock.unit
    return Measured(calls, collectives, together, messages, step, view / clock.unit)


def _program(trainer: Trainer) -> Any:
    assert trainer.executor.compiled is not None
    return trainer.executor.compiled.program


def _collectives(state: Candidates) -> list[CollectiveTime]:
    """Each kind by group and size, while all groups of the axis do it."""
    found, known = [], set[tuple[int, int]]()
    for trainer in state.trainers.values():
        world = trainer.engine.world
        for axis, size in world.mesh.axes:
            key = (size, world.mesh.stride(axis))
            if size == 1 or key in known:
                continue
            known.add(key)
            comm = world.comm(axis)
            for num_bytes in _SIZES:
                rows = torch.ones(size, max(num_bytes // size // 4, 1))
                runs: dict[CollectiveKind, Callable[[], Any]] = {
                    CollectiveKind.ALL_REDUCE: lambda comm=comm, rows=rows: comm.all_reduce(rows).wait(),
                    CollectiveKind.ALL_GATHER: lambda comm=comm, rows=rows: comm.all_gather(rows[0]).wait(),
                    CollectiveKind.REDUCE_SCATTER: lambda comm=comm, rows=rows: comm.reduce_scatter(rows).wait(),
                    CollectiveKind.ALL_TO_ALL: lambda comm=comm, rows=rows: comm.all_to_all(rows).wait(),
                    CollectiveKind.BROADCAST: lambda comm=comm, rows=rows: comm.broadcast(rows, 0).wait(),
                }
                with _first():
                    clock, times = Clock(), {}
                    for kind, run in runs.items():
                        run()
                        comm.barrier()
                        begin = time.perf_counter()
                        for _ in range(_RUNS):
                            run()
                        times[kind] = (time.perf_counter() - begin) / _RUNS
                    clock.done()
                whole = rows.numel() * 4
                found += [
                    CollectiveTime(kind.title, size, key[1], whole, seconds / clock.unit)
                    for kind, seconds in times.items()
                ]
                time.sleep(_PAUSE)
    return found


def _messages(state: Candidates) -> list[tuple[int, float]]:
    """Half of the time of a message there and back between ranks 0 and 1."""
    comm = state.tiny.engine.world.everyone()
    found = []
    for num_bytes in _SIZES[1:-2]:
        tensor = torch.ones(num_bytes // 4)
        comm.barrier()
        if state.rank > 1:
            continue
        times = []
        for tag in range(_RUNS):
            begin = time.perf_counter()
            if state.rank == 0:
                comm.send(tensor, 1, 2 * tag).wait()
                comm.recv(tensor, 1, 2 * tag + 1).wait()
            else:
                comm.recv(tensor, 0, 2 * tag).wait()
                comm.send(tensor, 0, 2 * tag + 1).wait()
            times.append((time.perf_counter() - begin) / 2)
        found.append((num_bytes, statistics.median(times)))
    return found


def _together(state: Candidates) -> list[tuple[int, float]]:
    """The mean speed of a rank while so many compute, in units of that while there is one for each core."""
    everyone = state.tiny.engine.world.everyone()
    left = torch.randn(512, 512)
    large = torch.randn(1 << 19)

    def work() -> None:
        for _ in range(4):
            left @ left
            large + large

    rates = {}
    for num in range(1, min(CORES, state.size) + 1):
        everyone.barrier()
        begin, count = time.perf_counter(), 0
        while (now := time.perf_counter()) < begin + 0.15:
            if state.rank < num:
                work()
                count += 1
                time.sleep(0)
            else:
                time.sleep(0.01)
        found = torch.tensor([count / (now - begin)])
        rates[num] = float(everyone.all_reduce(found).wait()) / num  # of ranks that share a core, the mean
    return [(num, rate / rates[min(CORES, state.size)]) for num, rate in rates.items()]


def _seconds(run: Callable[[], object], runs: int = 200) -> float:
    times = []
    for _ in range(runs):
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


@contextlib.contextmanager
def _first() -> Iterator[None]:
    """Context in which this process goes before all others, where the system lets it, so that what else the machine
    does disturbs a measurement less. Only for moments: others stand still meanwhile."""
    try:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    except PermissionError:
        yield
        return
    try:
        yield
    finally:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
