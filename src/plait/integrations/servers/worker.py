"""A worker's process: pull, compute, push, until there is nothing left to do.

A worker may be several ranks, each an actor of its own: the first talks to the coordinator, and every rank takes the
values from the object store itself.
"""

from __future__ import annotations

import os
import socket
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from plait.comm.launch import BOARD, meet_in
from plait.comm.process import process_world
from plait.comm.socket_store import serve_board
from plait.engine.tuning import keep_freed_memory
from plait.integrations.servers.client import Client
from plait.integrations.servers.cluster import OWN_FOLDER
from plait.integrations.servers.computing import Computing
from plait.integrations.servers.local_steps import LocalSteps
from plait.integrations.servers.notes import Refused, Task
from plait.integrations.servers.service import Job


class Worker:
    """One rank of a worker; an actor with several threads, of which one computes."""

    def __init__(self, job: Job, rank: int = 0, size: int = 1) -> None:
        self._job, self._rank, self._size = job, rank, size
        self._computing: Computing | LocalSteps | None = None
        self._board = ExitStack()  # which the first of several ranks holds
        torch.set_num_threads(job.num_threads)
        keep_freed_memory()

    def _meeting(self) -> dict[str, str]:
        """Where the ranks of this worker meet: a folder if Ray is this machine's own, else a port of this host."""
        import ray

        if (private := os.environ.get(OWN_FOLDER)) is not None:
            folder = Path(tempfile.mkdtemp(prefix="ranks-", dir=private))
            self._board.enter_context(serve_board(folder / BOARD))
            return meet_in(folder, os.getppid())
        host = ray.util.get_node_ip_address()
        with socket.socket() as probe:
            probe.bind((host, 0))
            return {"MASTER_ADDR": host, "MASTER_PORT": str(probe.getsockname()[1])}

    def begin(self, meeting: Mapping[str, str] | None = None) -> None:
        """Join the other ranks, and make the model ready."""
        torch.set_num_threads(self._job.num_threads)  # of this thread
        if meeting is not None:
            own = {"RANK": str(self._rank), "WORLD_SIZE": str(self._size), "LOCAL_RANK": "0"}
            os.environ |= own | dict(meeting)
        make = LocalSteps if self._job.is_local else Computing
        self._computing = make(self._job, process_world(self._job.plan.inner_plan.mesh))

    def compute(self, task: Task) -> None:
        """A rank's part of a step that the first rank pushes."""
        import ray

        assert self._computing is not None
        self._computing.compute(task, self._computing.read(task), ray.get(list(task.values)))

    def run(self, coordinator: Any, worker: int, peers: Sequence[Any] = ()) -> Refused | None:
        """The life of a worker, on its first rank; `peers` are the others. Returns when there is nothing left to do, or
        why it may not join."""
        import ray

        meeting = self._meeting() if peers else None
        others = [peer.begin.remote(meeting) for peer in peers]
        self.begin(meeting)
        ray.get(others)
        if (refused := self.join(coordinator, worker, peers)) is not None:
            return refused
        while self.once():
            pass
        self._link.close()
        return None

    def join(self, coordinator: Any, worker: int, peers: Sequence[Any] = ()) -> Refused | None:
        """Ask the coordinator for something to do."""
        assert self._computing is not None
        self._peers = peers
        self._link = Client(self._job, coordinator, worker, self._computing)
        return self._link.join()

    def once(self) -> bool:
        """Do a task, and push what comes of it; False when there is none any more."""
        import ray

        assert self._computing is not None
        if (work := self._link.next()) is None:
            return False
        others = [peer.compute.remote(work.task) for peer in self._peers]
        found = self._computing.compute(work.task, work.batch, work.arrays, work.rows)
        ray.get(others)
        self._link.push(work, found)
        return True

    def watch(self) -> None:
        """Returns never: whoever waits for it learns that this process is gone."""
        threading.Event().wait()

    def pid(self) -> int:
        return os.getpid()
