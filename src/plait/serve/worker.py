"""A worker's process: pull, compute, push, until there is nothing left to do.

A worker may be several ranks, each an actor of its own: the first talks to the chief, and every rank takes the values
from the object store itself.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from plait.comm.process import process_world
from plait.run.tuning import keep_freed_memory
from plait.serve.coding import Encoder
from plait.serve.computing import Computing
from plait.serve.job import Job
from plait.serve.local_steps import LocalSteps
from plait.serve.notes import Note, Refused, Task

_BETWEEN_TRIES = 0.2  # seconds


class Worker:
    """One rank of a worker; an actor with several threads, of which one computes."""

    def __init__(self, job: Job, rank: int = 0, size: int = 1) -> None:
        self._job, self._rank, self._size = job, rank, size
        self._computing: Computing | LocalSteps | None = None
        self._encoder = Encoder(job.coding, job.shards)
        torch.set_num_threads(job.num_threads)
        keep_freed_memory()

    def address(self) -> tuple[str, int]:
        """Where the ranks of this worker meet."""
        import ray

        with socket.socket() as probe:
            probe.bind(("", 0))
            return ray.util.get_node_ip_address(), int(probe.getsockname()[1])

    def begin(self, address: tuple[str, int] | None = None) -> None:
        """Join the other ranks, and make the model ready."""
        torch.set_num_threads(self._job.num_threads)  # of this thread
        if address is not None:
            os.environ |= {
                "RANK": str(self._rank), "WORLD_SIZE": str(self._size), "LOCAL_RANK": "0",
                "MASTER_ADDR": address[0], "MASTER_PORT": str(address[1]),
            }  # fmt: skip
        make = LocalSteps if self._job.is_local else Computing
        self._computing = make(self._job, process_world(self._job.plan.within.mesh))

    def compute(self, task: Task) -> None:
        """A rank's part of a step that the first rank pushes."""
        import ray

        assert self._computing is not None
        self._computing.compute(task, self._computing.read(task), ray.get(list(task.values)))

    def run(self, chief: Any, worker: int, peers: Sequence[Any] = (), address: Any = None) -> Refused | None:
        """The life of a worker, on its first rank. Returns when there is nothing left to do, or why it may not join."""
        self.begin(address)
        task = self.join(chief, worker, peers)
        while isinstance(task, Task):
            task = self.once(task)
        return task

    def join(self, chief: Any, worker: int, peers: Sequence[Any] = ()) -> Task | Refused | None:
        """Ask the chief for something to do."""
        import ray

        assert self._computing is not None
        self._chief, self._worker, self._peers = chief, worker, peers
        self._servers = [ray.get_actor(name) for name in self._job.server_names] if self._job.tables else []
        found: Task | Refused | None = ray.get(chief.join.remote(worker, self._computing.fingerprint))
        self._asked = time.perf_counter()
        return found

    def once(self, task: Task) -> Task | None:
        """Do a task, and push what comes of it; returns the next one."""
        import ray

        assert self._computing is not None
        begun = time.perf_counter()
        batch = self._computing.read(task)
        data_seconds = time.perf_counter() - begun
        try:
            rows = ray.get(self._pull_rows())
            arrays = ray.get(list(task.values))
        except ray.exceptions.RayTaskError:
            raise
        except ray.exceptions.RayError:  # a server or the chief is gone, and comes back
            time.sleep(_BETWEEN_TRIES)
            again: Task | None = ray.get(self._chief.again.remote(self._worker))
            return again
        waited = time.perf_counter() - self._asked - data_seconds
        others = [peer.compute.remote(task) for peer in self._peers]
        found = self._computing.compute(task, batch, arrays, rows)
        ray.get(others)
        push = self._encoder.encode(found.arrays)
        moved = _num_bytes(each for some in (arrays, *rows, *push) for each in some)
        gradients = [ray.put(each) for each in push]
        note = Note(
            self._worker, self._job.name, task.version, found.loss, found.weight, found.tokens, waited,
            data_seconds + found.reading, moved, found.buffers, found.moments,
        )  # fmt: skip
        self._asked = time.perf_counter()
        after: Task | None = ray.get(self._chief.push.remote(note, gradients))
        return after

    def _pull_rows(self) -> list[Any]:
        """References to the rows that the batch wants, of every server; none without tables."""
        assert self._computing is not None
        wanted = self._computing.wanted
        return [server.pull.remote(wanted(index)) for index, server in enumerate(self._servers)]

    def watch(self) -> None:
        """Returns never: whoever waits for it learns that this process is gone."""
        threading.Event().wait()

    def pid(self) -> int:
        return os.getpid()


def _num_bytes(arrays: Iterable[np.ndarray | None]) -> int:
    return sum(array.nbytes for array in arrays if array is not None)
