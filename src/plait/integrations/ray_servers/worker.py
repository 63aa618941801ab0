"""A worker's process: it pulls values, computes and pushes gradients until the run ends.

A worker may have several ranks, each an actor. The first rank communicates with the coordinator; every rank reads the
values from the object store itself.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import socket
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from plait.comm.key_value_store import serve_store
from plait.comm.launch import SOCKET, meet_in
from plait.comm.process_world import process_world
from plait.engine.cpu_settings import keep_freed_memory
from plait.integrations.ray_servers.local_steps import LocalSteps
from plait.integrations.ray_servers.messages import Note, Refused, Task
from plait.integrations.ray_servers.push_compression import Encoder
from plait.integrations.ray_servers.ray_cluster import OWN_FOLDER
from plait.integrations.ray_servers.server_job import Job
from plait.integrations.ray_servers.worker_gradients import Computing, Gradient

_BETWEEN_TRIES = 0.2  # seconds


@dataclass(frozen=True)
class Assignment:
    """A task with everything that it needs.

    task     the task from the coordinator
    batch    the batch and its table lookup, as `Computing.read` returns them
    rows     from every server, the rows of its tables
    arrays   from every server, its values
    asked    when the worker asked for it, in seconds of `time.perf_counter`
    reading  seconds spent on reading the batch
    waited   seconds that the computation stood still for values
    data     seconds that the computation stood still for data
    """

    task: Task
    batch: Any
    rows: list[Any]
    arrays: list[np.ndarray]
    asked: float
    reading: float
    waited: float = 0.0
    data: float = 0.0


class Client:
    """A worker's connection to coordinator and servers: it sends gradients and receives tasks.

        compute --push--> [send] encode, put, notify --> [receive] next task, its batch, rows, values --next--> compute

    Sending and receiving each have a thread, and handle items in order. With `overlap=N` the worker has N tasks besides
    the one that it computes, so that both threads work during the computation; without it the computation waits for
    them. The worker has joined once `join` returns None.
    """

    def __init__(self, job: Job, coordinator: Any, worker: int, computing: Computing | LocalSteps) -> None:
        import ray

        self._ray = ray
        self._job, self._coordinator, self._worker, self._computing = job, coordinator, worker, computing
        self._servers = [ray.get_actor(name) for name in job.server_names] if job.tables else []
        self._encoder = Encoder(job.coding, job.shards)
        self._number = 0
        threads = (lambda: torch.set_num_threads(job.num_threads),)
        self._sending = ThreadPoolExecutor(1, "plait send", *threads)
        self._receiving = ThreadPoolExecutor(1, "plait take", *threads)
        self._assignments: deque[Future[Assignment | None]] = deque()

    def join(self) -> Refused | None:
        """Ask the coordinator for the first tasks, which `next` then returns. Returns Refused if the worker may not
        join."""
        asked = time.perf_counter()
        found = self._ray.get(self._coordinator.join.remote(self._worker, self._computing.fingerprint))
        if isinstance(found, Refused):
            return found
        for task in found or [None]:
            self._expect(functools.partial(lambda t: (t, asked), task))
        return None

    def next(self) -> Assignment | None:
        """Wait for the next assignment. None: the run is ending."""
        begun = time.perf_counter()
        assignment = self._assignments.popleft().result()
        if assignment is None:
            return None
        stood = time.perf_counter() - max(begun, assignment.asked)
        data = max(0.0, min(assignment.reading, stood))
        return dataclasses.replace(assignment, waited=max(0.0, stood - data), data=data)

    def push(self, assignment: Assignment, found: Gradient) -> None:
        """Send the gradient of an assignment, and request the next one."""
        sent = self._sending.submit(self._send, assignment, found)

        def answer() -> tuple[Task | None, float]:
            reference, asked = sent.result()
            return self._ray.get(reference), asked

        self._expect(answer)

    def close(self) -> None:
        """Stop both threads."""
        for thread in (self._sending, self._receiving):
            thread.shutdown(wait=False, cancel_futures=True)

    def _expect(self, answer: Callable[[], tuple[Task | None, float]]) -> None:
        self._assignments.append(self._receiving.submit(lambda: self._receive(*answer())))

    def _send(self, assignment: Assignment, found: Gradient) -> tuple[Any, float]:
        """Send a push. Returns the reference of the coordinator's answer, and the time when it was asked."""
        push = self._encoder.encode(found.arrays)
        num_bytes = _num_bytes(array for arrays in (assignment.arrays, *assignment.rows, *push) for array in arrays)
        gradients = [self._ray.put(arrays) for arrays in push]
        self._number += 1
        note = Note(
            self._worker, self._number, self._job.name, assignment.task.piece, assignment.task.version, found.loss,
            found.weight, found.tokens, assignment.waited, assignment.data + found.reading, num_bytes, found.buffers,
            found.moments,
        )  # fmt: skip
        return self._coordinator.push.remote(note, gradients), time.perf_counter()

    def _receive(self, task: Task | None, asked: float) -> Assignment | None:
        """Read everything that a task needs."""
        ray = self._ray
        while task is not None:
            since = time.perf_counter()
            batch = self._computing.read(task)
            reading = time.perf_counter() - since
            try:
                wanted = batch[1].wanted
                rows = ray.get([server.pull.remote(wanted(index)) for index, server in enumerate(self._servers)])
                return Assignment(task, batch, rows, ray.get(list(task.values)), asked, reading)
            except ray.exceptions.RayTaskError:
                raise
            except ray.exceptions.RayError:  # a server or the coordinator is gone, and is being restarted
                time.sleep(_BETWEEN_TRIES)
                task = ray.get(self._coordinator.again.remote(self._worker, dataclasses.replace(task, values=())))
        return None


def _num_bytes(arrays: Iterable[np.ndarray | None]) -> int:
    return sum(array.nbytes for array in arrays if array is not None)


class Worker:
    """One rank of a worker: an actor with several threads, one of which computes."""

    def __init__(self, job: Job, rank: int = 0, size: int = 1) -> None:
        self._job, self._rank, self._size = job, rank, size
        self._computing: Computing | LocalSteps | None = None
        self._store_server = ExitStack()  # the ranks' key-value store, served by the first of several ranks
        torch.set_num_threads(job.num_threads)
        keep_freed_memory()

    def _rendezvous(self) -> dict[str, str]:
        """The rendezvous of this worker's ranks: a folder if Ray was started for this run, else a port of this host."""
        import ray

        if (private := os.environ.get(OWN_FOLDER)) is not None:
            folder = Path(tempfile.mkdtemp(prefix="ranks-", dir=private))
            self._store_server.enter_context(serve_store(folder / SOCKET))
            return meet_in(folder, os.getppid())
        host = ray.util.get_node_ip_address()
        with socket.socket() as probe:
            probe.bind((host, 0))
            return {"MASTER_ADDR": host, "MASTER_PORT": str(probe.getsockname()[1])}

    def begin(self, rendezvous: Mapping[str, str] | None = None) -> None:
        """Join the other ranks, and prepare the model."""
        torch.set_num_threads(self._job.num_threads)  # the setting is per thread
        if rendezvous is not None:
            own = {"RANK": str(self._rank), "WORLD_SIZE": str(self._size), "LOCAL_RANK": "0"}
            os.environ |= own | dict(rendezvous)
        make = LocalSteps if self._job.is_local else Computing
        self._computing = make(self._job, process_world(self._job.plan.inner_plan.mesh))

    def compute(self, task: Task) -> None:
        """Compute this rank's part of a task whose result the first rank pushes."""
        import ray

        assert self._computing is not None
        self._computing.compute(task, self._computing.read(task), ray.get(list(task.values)))

    def run(self, coordinator: Any, worker: int, peers: Sequence[Any] = ()) -> Refused | None:
        """Run the worker, on its first rank; `peers` are the actors of its other ranks. Returns None when the run has
        ended, or Refused if the worker may not join."""
        import ray

        rendezvous = self._rendezvous() if peers else None
        others = [peer.begin.remote(rendezvous) for peer in peers]
        self.begin(rendezvous)
        ray.get(others)
        if (refused := self.join(coordinator, worker, peers)) is not None:
            return refused
        while self.once():
            pass
        self._client.close()
        return None

    def join(self, coordinator: Any, worker: int, peers: Sequence[Any] = ()) -> Refused | None:
        """Ask the coordinator for the first tasks. Returns Refused if the worker may not join."""
        assert self._computing is not None
        self._peers = peers
        self._client = Client(self._job, coordinator, worker, self._computing)
        return self._client.join()

    def once(self) -> bool:
        """Do one task and push its gradient. Returns False if there was none, because the run is ending."""
        import ray

        assert self._computing is not None
        if (assignment := self._client.next()) is None:
            return False
        others = [peer.compute.remote(assignment.task) for peer in self._peers]
        gradient = self._computing.compute(assignment.task, assignment.batch, assignment.arrays, assignment.rows)
        ray.get(others)
        self._client.push(assignment, gradient)
        return True

    def watch(self) -> None:
        """Never return. A caller that waits for the result learns when this process ends."""
        threading.Event().wait()

    def pid(self) -> int:
        """The id of this process."""
        return os.getpid()
