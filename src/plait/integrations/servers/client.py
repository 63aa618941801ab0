"""A worker's line to coordinator and servers: what it has computed goes out, what it computes next comes in.

    compute --push--> [send] encode, put, tell it --> [take] next task, its batch, rows, values --next--> compute

Each of the two is a thread of its own, and takes things in their order. With `overlap=N` the worker has N tasks beside
the one that it computes, so that both work while it does; without it waits for them.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from plait.integrations.servers.coding import Encoder
from plait.integrations.servers.computing import Computing, Gradient
from plait.integrations.servers.local_steps import LocalSteps
from plait.integrations.servers.notes import Note, Refused, Task
from plait.integrations.servers.service import Job

_BETWEEN_TRIES = 0.2  # seconds


@dataclass(frozen=True)
class Assignment:
    """A task with all that it needs: what was read for it, every server's rows and values. `waited` and `data` are the
    seconds that the worker stood still for it, for values and for data."""

    task: Task
    batch: Any
    rows: list[Any]
    arrays: list[np.ndarray]
    asked: float  # when, and how long it then took to read
    reading: float
    waited: float = 0.0
    data: float = 0.0


class Client:
    """Of one worker, which has joined once `join` returns None."""

    def __init__(self, job: Job, coordinator: Any, worker: int, computing: Computing | LocalSteps) -> None:
        import ray

        self._ray = ray
        self._job, self._coordinator, self._worker, self._computing = job, coordinator, worker, computing
        self._servers = [ray.get_actor(name) for name in job.server_names] if job.tables else []
        self._encoder = Encoder(job.coding, job.shards)
        self._number = 0
        threads = (lambda: torch.set_num_threads(job.num_threads),)
        self._sending = ThreadPoolExecutor(1, "plait send", *threads)
        self._taking = ThreadPoolExecutor(1, "plait take", *threads)
        self._works: deque[Future[Assignment | None]] = deque()

    def join(self) -> Refused | None:
        """Ask the coordinator for something to do, which `next` then returns; or why there is nothing for it."""
        asked = time.perf_counter()
        found = self._ray.get(self._coordinator.join.remote(self._worker, self._computing.fingerprint))
        if isinstance(found, Refused):
            return found
        for task in found or [None]:
            self._expect(functools.partial(lambda t: (t, asked), task))
        return None

    def next(self) -> Assignment | None:
        """What to compute now, once it is there. None: there is nothing to do any more."""
        begun = time.perf_counter()
        work = self._works.popleft().result()
        if work is None:
            return None
        stood = time.perf_counter() - max(begun, work.asked)
        data = max(0.0, min(work.reading, stood))
        return dataclasses.replace(work, waited=max(0.0, stood - data), data=data)

    def push(self, work: Assignment, found: Gradient) -> None:
        """Send what came of a work, and have the next one come."""
        sent = self._sending.submit(self._send, work, found)

        def answer() -> tuple[Task | None, float]:
            reference, asked = sent.result()
            return self._ray.get(reference), asked

        self._expect(answer)

    def close(self) -> None:
        for thread in (self._sending, self._taking):
            thread.shutdown(wait=False, cancel_futures=True)

    def _expect(self, answer: Callable[[], tuple[Task | None, float]]) -> None:
        self._works.append(self._taking.submit(lambda: self._take(*answer())))

    def _send(self, work: Assignment, found: Gradient) -> tuple[Any, float]:
        """The reference of the coordinator's answer to a push, and when it was asked."""
        push = self._encoder.encode(found.arrays)
        moved = _num_bytes(array for arrays in (work.arrays, *work.rows, *push) for array in arrays)
        gradients = [self._ray.put(arrays) for arrays in push]
        self._number += 1
        note = Note(
            self._worker, self._number, self._job.name, work.task.piece, work.task.version, found.loss, found.weight,
            found.tokens, work.waited, work.data + found.reading, moved, found.buffers, found.moments,
        )  # fmt: skip
        return self._coordinator.push.remote(note, gradients), time.perf_counter()

    def _take(self, task: Task | None, asked: float) -> Assignment | None:
        """Have all that a task needs come."""
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
            except ray.exceptions.RayError:  # a server or the coordinator is gone, and comes back
                time.sleep(_BETWEEN_TRIES)
                task = ray.get(self._coordinator.again.remote(self._worker, dataclasses.replace(task, values=())))
        return None


def _num_bytes(arrays: Iterable[np.ndarray | None]) -> int:
    return sum(array.nbytes for array in arrays if array is not None)
