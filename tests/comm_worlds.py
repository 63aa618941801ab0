"""Worlds of every transport, for tests: `run(transport, num_ranks, fn)`."""

from __future__ import annotations

import atexit
import functools
import multiprocessing
import multiprocessing.forkserver
import os
import runpy
import socket
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from plait.comm.protocol import World
from plait.comm.thread_world import run_ranks
from plait.spec.mesh import Mesh

TRANSPORTS = [
    "threads",
    "threads-ring",
    "threads-naive",
    "strict",
    "strict-ring",
    "strict-naive",
    "gloo",
    "shm",
    "shm-ring",
    "shm-naive",
]

Fn = Callable[[World], Any]


def run(transport: str, num_ranks: int | Mesh, fn: Fn) -> list[Any]:
    """What `fn(world)` returns on every rank. For processes `fn` is a function of a module."""
    mesh = num_ranks if isinstance(num_ranks, Mesh) else Mesh((("data", num_ranks),))
    kind, _, algorithm = transport.partition("-")
    algorithm = algorithm or "backend"
    if kind in ("threads", "strict"):
        return run_ranks(mesh, fn, algorithm=algorithm, strict=kind == "strict")
    context = forkserver()
    port = free_port()
    pipes, processes = [], []
    for rank in range(mesh.size):
        here, there = context.Pipe(duplex=False)
        process = context.Process(target=_rank, args=(there, rank, port, mesh, algorithm, kind == "shm", fn))
        process.start()
        there.close()
        pipes.append(here)
        processes.append(process)
    try:
        results = [pipe.recv() for pipe in pipes]
    finally:
        for process in processes:
            process.join(20)
            process.kill()
    for rank, (ok, result) in enumerate(results):
        assert ok, f"rank {rank}: {result}"
    return [result for _, result in results]


def _rank(pipe: Any, rank: int, port: int, mesh: Mesh, algorithm: str, shared_memory: bool, fn: Fn) -> None:
    import torch

    from plait.comm.process_world import process_world

    torch.set_num_threads(1)
    os.environ |= environment(rank, mesh.size, port)
    try:
        world = process_world(mesh, device="cpu", algorithm=algorithm, shared_memory=shared_memory)
        result = fn(world)
        world.everyone().barrier()
        pipe.send((True, result))
        world.close()
    except Exception:  # shown by the parent
        pipe.send((False, traceback.format_exc()))


def environment(rank: int, size: int, port: int) -> dict[str, str]:
    """What torchrun would set."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def free_port() -> int:
    """One that nobody has; of the suite's processes that run side by side each finds others."""
    count = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    own = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))  # past the count where one has crashed
    while True:
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            port: int = found.getsockname()[1]
        if port // 2 % count == own % count:  # by two: Linux prefers odd ones
            return port


class Script:
    """A source that runs as a rank in a process of its own; what it prints and complains of goes to files."""

    def __init__(self, source: str, rank: int, size: int, port: int, folder: Path) -> None:
        self._out, self._complaints = folder / f"{rank}.out", folder / f"{rank}.err"
        arguments = (source, environment(rank, size, port), str(self._out), str(self._complaints))
        self.process = forkserver().Process(target=_run_script, args=arguments)
        self.process.start()

    def wait_ready(self) -> None:
        """Until it has printed its first line."""
        end = time.monotonic() + 60
        while not (self._out.exists() and "\n" in self._out.read_text()):
            assert time.monotonic() < end, self._complaints.read_text()
            time.sleep(0.01)

    def outcome(self) -> tuple[int | None, str, str]:
        """Exit status, what it printed, what it complained of. None as status: it had to be ended."""
        self.process.join(30)
        status = self.process.exitcode
        self.process.kill()
        return status, self._out.read_text(), self._complaints.read_text()


def start_scripts(source: str, size: int, folder: Path) -> list[Script]:
    port = free_port()
    return [Script(source, rank, size, port, folder) for rank in range(size)]


def _run_script(source: str, variables: dict[str, str], out: str, complaints: str) -> None:
    import torch

    for path, fd in ((out, 1), (complaints, 2)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), fd)
    torch.set_num_threads(1)
    os.environ |= variables
    exec(source, {})
    sys.stdout.flush()


class ForkedPlait:
    """In place of the subprocess.Popen of `python -m plait`: a launcher or a rank that finds torch and plait imported.

    Its parent is the process that forks; all else is as that starts it."""

    def __init__(self, command: list[str], env: dict[str, str], start_new_session: bool) -> None:
        assert start_new_session and command[:3] == [sys.executable, "-m", "plait"]
        outputs = [f"/proc/{os.getpid()}/fd/{number}" for number in (1, 2)]
        here, there = multiprocessing.Pipe(duplex=False)
        arguments = (there, command[3:], env, os.getcwd(), outputs)
        self._process = forkserver().Process(target=_run_plait, args=arguments)
        self._process.start()
        there.close()
        here.recv()  # its session is there: it can be sent signals
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    returncode = property(poll)

    def wait(self) -> None:
        self._process.join()


def _run_plait(ready: Any, arguments: list[str], variables: dict[str, str], folder: str, outputs: list[str]) -> None:
    os.setsid()
    os.chdir(folder)
    for number, path in enumerate(outputs, start=1):
        opened = os.open(path, os.O_WRONLY | os.O_APPEND)
        os.dup2(opened, number)
        os.close(opened)
    os.environ.clear()
    os.environ |= variables
    if "PLAIT_LAUNCHER" in variables:  # of a rank: what it ends with
        os.environ["PLAIT_LAUNCHER"] = str(os.getppid())
    sys.argv = ["plait", *arguments]
    ready.send(None)
    ready.close()
    try:
        runpy.run_module("plait", run_name="__main__", alter_sys=True)
    finally:
        atexit._run_exitfuncs()  # which multiprocessing leaves out


@functools.cache
def forkserver() -> Any:
    """What starts processes as forks of one that has imported torch and plait."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["plait.comm.process_world", "plait.comm.stop_vote", "plait.api.trainer", "pytest", "forked"]
    )
    before = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), before])  # where it finds forked.py
    try:
        multiprocessing.forkserver.ensure_running()
    finally:
        os.environ["PYTHONPATH"] = before
    return context
