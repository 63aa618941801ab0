"""Servers and coordinator as Ray actors. Gradients are read from the object store without a copy."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch

from plait.engine.cpu_settings import keep_freed_memory
from plait.engine.optimizers import OptimizerFactory
from plait.integrations.servers.coding import Coding
from plait.integrations.servers.coordinator import Coordinator
from plait.integrations.servers.server import Server, Standing
from plait.integrations.servers.service import Job
from plait.integrations.servers.tables.table_shard import TableSpec
from plait.schedule.balance import Piece


class ServerActor(Server):
    """A server as an actor. Ray runs its calls one after the other, in the coordinator's order."""

    def __init__(
        self,
        job: str,
        pieces: Sequence[Piece],
        make_optimizer: OptimizerFactory,
        make_scheduler: Callable[[torch.optim.Optimizer], Any] | None,
        folder: str,
        tables: Sequence[TableSpec] = (),
        coding: Coding = Coding(),  # noqa: B008  (a frozen value)
    ) -> None:
        import ray

        torch.set_num_threads(1)
        keep_freed_memory()
        super().__init__(job, pieces, make_optimizer, make_scheduler, folder, ray.get, tables, coding)

    def where(self) -> Standing:
        """The server's position in the run."""
        return self.standing

    def pid(self) -> int:
        """The id of this process."""
        return os.getpid()


class CoordinatorActor(Coordinator):
    """The coordinator as an actor. It is given actor names, so that a restarted one finds the other actors."""

    def __init__(self, job: Job, servers: Sequence[str], evaluator: str | None = None) -> None:
        import ray

        torch.set_num_threads(1)
        found = None if evaluator is None else ray.get_actor(evaluator)
        super().__init__(job, [ray.get_actor(name) for name in servers], found)
