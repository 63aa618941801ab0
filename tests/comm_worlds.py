"""Worlds of every transport, for tests: `run(transport, num_ranks, fn)`."""

from __future__ import annotations

import multiprocessing
import os
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from plait.comm.protocol import World
from plait.comm.threads import run_ranks
from plait.spec.mesh import Mesh

TRANSPORTS = ["threads", "threads-ring", "threads-naive", "gloo", "shm", "shm-ring", "shm-naive"]

Fn = Callable[[World], Any]


def run(transport: str, num_ranks: int | Mesh, fn: Fn) -> list[Any]:
    """What `fn(world)` returns on every rank. For processes `fn` is a function of a module."""
    mesh = num_ranks if isinstance(num_ranks, Mesh) else Mesh((("data", num_ranks),))
    kind, _, algorithm = transport.partition("-")
    algorithm = algorithm or "backend"
    if kind == "threads":
        return run_ranks(mesh, fn, algorithm=algorithm)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "plait.comm.process", "pytest"])
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

    from plait.comm.process import process_world

    torch.set_num_threads(1)
    os.environ |= environment(rank, mesh.size, port)
    try:
        world = process_world(mesh, device="cpu", algorithm=algorithm, shared_memory=shared_memory)
        result = fn(world)
        world.everyone().barrier()
        pipe.send((True, result))
        world.close()
    except Exception:  # noqa: BLE001 - shown by the parent
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
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def start_script(source: str, size: int) -> list[subprocess.Popen[str]]:
    """Run the source as a program on `size` ranks, each with pipes of its own."""
    port = free_port()
    return [
        subprocess.Popen(
            [sys.executable, "-c", source],
            env=os.environ | environment(rank, size, port) | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
            cwd=Path(__file__).parent,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
