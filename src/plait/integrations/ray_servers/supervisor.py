"""Starts, watches and replaces the actors of a run with parameter servers, in the process that the user started.

Ray restarts coordinator, servers and evaluator by itself, and each continues where it was. A worker that ends is
replaced by a new one, which joins under a new number.
"""

from __future__ import annotations

import itertools
import re
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from plait.errors import LossError, PlaitError, PlanError, RoleFailed, WorldError
from plait.integrations.ray_servers.coordinator import CoordinatorActor
from plait.integrations.ray_servers.evaluator import Evaluator
from plait.integrations.ray_servers.messages import End, Progress, Refused
from plait.integrations.ray_servers.ray_cluster import is_own
from plait.integrations.ray_servers.run_metrics import EVENTS
from plait.integrations.ray_servers.server import ServerActor
from plait.integrations.ray_servers.server_job import Job
from plait.integrations.ray_servers.worker import Worker

_LOOK_SECONDS = 0.5
_TRIES = 5  # times each worker may die without a step in between
_COMES_BACK = {"max_restarts": -1, "max_task_retries": -1}


@dataclass
class _Group:
    """The ranks of a worker.

    actors   one actor per rank
    run      the reference of `Worker.run` on the first rank: ready when the worker or its process ends
    watches  references of `Worker.watch` on the other ranks: ready when their processes end
    leaving  whether the worker was asked to leave
    """

    worker: int
    actors: list[object]
    run: Any
    watches: list[object]
    leaving: bool = False


class RunSupervisor:
    """The actors of a job on an initialised Ray. `close` ends every actor that was started here."""

    def __init__(self, ray: ModuleType, job: Job) -> None:
        self.job = job
        self._ray = ray
        self._groups: list[_Group] = []
        self._ids = itertools.count()
        self._deaths = 0  # workers that died since the last step
        self._step = -1
        self._snapshots = Path(job.out) / "servers"
        self._snapshots.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(self._snapshots, ignore_errors=True)  # of an earlier run
        if not job.resume:
            (Path(job.out) / EVENTS).unlink(missing_ok=True)
        names = job.server_names
        make_server = ray.remote(num_cpus=1, scheduling_strategy="SPREAD", **_COMES_BACK)(ServerActor)
        self.servers = [
            make_server.options(name=name).remote(
                job.name,
                pieces,
                job.server_optimizer,
                job.server_scheduler,
                str(self._snapshots / str(index)),
                job.tables,
                job.coding,
            )
            for index, (name, pieces) in enumerate(zip(names, job.shards, strict=True))
        ]
        self.evaluator, evaluator = None, None
        if job.evaluate_every:
            evaluator = f"plait-{job.name}-evaluator"
            self.evaluator = ray.remote(num_cpus=0, name=evaluator, **_COMES_BACK)(Evaluator).remote(job)
        self.coordinator = ray.remote(num_cpus=0, **_COMES_BACK)(CoordinatorActor).remote(job, names, evaluator)
        gpus = ray.cluster_resources().get("GPU", 0)
        self._gpus = int(gpus >= job.plan.workers * job.plan.inner_plan.num_processes)
        try:
            for _ in range(job.plan.workers):
                self.add_worker()
            self.first_step: int = self._get(self.coordinator.begin.remote())
        except BaseException:
            self.close()
            raise

    @property
    def workers(self) -> dict[int, list[object]]:
        """The actors of every worker, by worker number."""
        return {group.worker: group.actors for group in self._groups}

    def add_worker(self) -> int:
        """Start one more worker, which joins when it is ready. Returns its number."""
        ray, size, worker = self._ray, self.job.plan.inner_plan.num_processes, next(self._ids)
        has_room = ray.available_resources().get("CPU", 0) >= size
        cpus = int(has_room or not is_own())  # a cluster started for the run only has CPUs for the plan's own workers
        make = ray.remote(num_cpus=cpus, num_gpus=self._gpus, max_concurrency=3, scheduling_strategy="SPREAD")(Worker)
        if cpus and not has_room:
            self.coordinator.note.remote(
                "worker", f"worker {worker} begins once the Ray cluster has {size} free CPUs for it"
            )
        actors = [make.remote(self.job, rank, size) for rank in range(size)]
        run = actors[0].run.remote(self.coordinator, worker, actors[1:])
        self._groups.append(_Group(worker, actors, run, [actor.watch.remote() for actor in actors[1:]]))
        return worker

    def remove_worker(self, worker: int) -> None:
        """Have a worker leave. The piece of data that it is working on goes to another worker."""
        for group in self._groups:
            if group.worker == worker:
                group.leaving = True
                self._get(self.coordinator.leave.remote(worker, "asked to", False))

    def wait(
        self, show: Callable[[Progress], None] = lambda progress: None, stopped: Callable[[], bool] = lambda: False
    ) -> End:
        """Wait until the run is over. `show` is called about twice a second; the run ends early when `stopped` returns
        True.

        Raises LossError for a loss that is not finite, PlanError for a worker with another model, RoleFailed for an
        error that a worker raised, and WorldError if workers keep dying.
        """
        ray = self._ray
        end, progress, asked = self.coordinator.end.remote(), self.coordinator.progress.remote(), False
        while True:
            waiting = [end, progress, *(ref for group in self._groups for ref in (group.run, *group.watches))]
            ready, _ = ray.wait(waiting, num_returns=1, timeout=_LOOK_SECONDS)
            if end in ready:
                found: End = self._get(end)
                show(self._get(self.coordinator.progress.remote()))
                if found.error:
                    raise LossError(found.error) if found.of_loss else WorldError(found.error)
                return found
            if progress in ready:
                now: Progress = self._get(progress)
                self._deaths = 0 if now.step > self._step else self._deaths
                self._step = now.step
                show(now)
                time.sleep(_LOOK_SECONDS)
                progress = self.coordinator.progress.remote()
            for group in [g for g in self._groups if {g.run, *g.watches} & set(ready)]:
                self._handle_exit(group)
            if stopped() and not asked:
                asked = True
                self.coordinator.stop.remote()

    def close(self) -> None:
        """End all actors."""
        others = [self.coordinator, *self.servers, *([self.evaluator] if self.evaluator is not None else [])]
        for actor in [*(actor for group in self._groups for actor in group.actors), *others]:
            self._ray.kill(actor, no_restart=True)
        self._groups = []
        shutil.rmtree(self._snapshots, ignore_errors=True)  # snapshots are of no use without the servers

    def _handle_exit(self, group: _Group) -> None:
        """Handle a worker that has ended: it left, or the run is ending, or it was killed and is replaced."""
        ray = self._ray
        why = "its process has ended"
        if not group.watches or ray.wait([group.run], timeout=0)[0]:
            try:
                refused = self._get(group.run)
                if isinstance(refused, Refused):
                    raise PlanError(refused.why)
                ends = group.leaving or self._get(self.coordinator.is_ending.remote())
                why = "" if ends else "the coordinator no longer knew it"
            except RoleFailed as error:
                raise RoleFailed(f"worker {group.worker} failed: {error}") from None
            except WorldError as error:
                why = str(error)
        self._groups.remove(group)
        for actor in group.actors:
            ray.kill(actor, no_restart=True)
        if group.leaving or not why:
            return
        self._deaths += 1
        if self._deaths > _TRIES * self.job.plan.workers:
            raise WorldError(
                f"workers die one after the other, and no step is done in between; the last: {why} (events.jsonl in"
                f" {self.job.out} says at which batches of the data)"
            )
        self.coordinator.leave.remote(group.worker, why)
        self.add_worker()

    def _get(self, reference: object) -> Any:
        """The result of a call. An error of plait is raised again; RoleFailed stands for any other error, WorldError
        for a process that is gone."""
        ray = self._ray
        try:
            return ray.get(reference)
        except ray.exceptions.RayTaskError as error:
            cause = error.cause
            if isinstance(cause, PlaitError):
                raise cause from None
            if isinstance(cause, ray.exceptions.RayError):
                raise WorldError(f"a rank of it is gone: {type(cause).__name__}") from None
            raise RoleFailed(_in_words(error)) from None
        except ray.exceptions.RayActorError as error:
            raise WorldError(f"its process has ended: {str(error).splitlines()[0]}") from None


def _in_words(error: Any) -> str:
    """The error that a call raised, with its file and line."""
    places = re.findall(r'File "([^"]+)", line (\d+)', str(error))
    where = f" ({places[-1][0]}:{places[-1][1]})" if places else ""
    return f"{type(error.cause).__name__}: {error.cause}{where}"
