"""A worker's process: it pulls values, computes and pushes gradients until the run ends.

A worker may have several ranks, each an actor. The first rank talks to the coordinator; every rank reads the values
from the object store itself.
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

from plait.comm.launch import SOCKET, meet_in
from plait.comm.process import process_world
from plait.comm.socket_store import serve_store
from plait.engine.cpu_settings import keep_freed_memory
from plait.integrations.servers.client import Client
from plait.integrations.servers.cluster import OWN_FOLDER
from plait.integrations.servers.computing import Computing
from plait.integrations.servers.local_steps import LocalSteps
from plait.integrations.servers.notes import Refused, Task
from plait.integrations.servers.service import Job


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
