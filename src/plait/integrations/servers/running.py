"""A run under way: its actors are started, watched and replaced here, in the process that the user started.

Ray brings coordinator, servers and evaluator back by itself, each to where it was. A worker that is gone is replaced by
a new one, which joins under a number of its own.
"""

from __future__ import annotations

import itertools
import re
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plait.errors import LossError, PlaitError, PlanError, RoleFailed, WorldError
from plait.integrations.servers.actors import CoordinatorActor, ServerActor
from plait.integrations.servers.cluster import is_own
from plait.integrations.servers.evaluator import Evaluator
from plait.integrations.servers.notes import End, Progress, Refused
from plait.integrations.servers.run_metrics import EVENTS
from plait.integrations.servers.service import Job
from plait.integrations.servers.worker import Worker

_LOOK_SECONDS = 0.5
_TRIES = 5  # of workers that die one after the other without a step in between
_COMES_BACK = {"max_restarts": -1, "max_task_retries": -1}


@dataclass
class _Group:
    """The ranks of a worker; `life` ends with its first rank's, and `watches` with the others'."""

    worker: int
    actors: list[Any]
    life: Any
    watches: list[Any]
    leaving: bool = False


class Running:
    """`ray` is initialised. `close` ends everything that was started here."""

    def __init__(self, ray: Any, job: Job) -> None:
        self.job = job
        self._ray = ray
        self._groups: list[_Group] = []
        self._ids = itertools.count()
        self._deaths = 0  # since the last step
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
    def workers(self) -> dict[int, list[Any]]:
        """The actors of every worker, by its number."""
        return {group.worker: group.actors for group in self._groups}

    def add_worker(self) -> int:
        """Start one more worker, which joins when it is ready; returns its number."""
        ray, size, worker = self._ray, self.job.plan.inner_plan.num_processes, next(self._ids)
        has_room = ray.available_resources().get("CPU", 0) >= size
        cpus = int(has_room or not is_own())  # this machine's own Ray has room for those that the plan begins with
        make = ray.remote(num_cpus=cpus, num_gpus=self._gpus, max_concurrency=3, scheduling_strategy="SPREAD")(Worker)
        if cpus and not has_room:
            self.coordinator.note.remote(
                "worker", f"worker {worker} begins once the Ray cluster has {size} free CPUs for it"
            )
        actors = [make.remote(self.job, rank, size) for rank in range(size)]
        life = actors[0].run.remote(self.coordinator, worker, actors[1:])
        self._groups.append(_Group(worker, actors, life, [actor.watch.remote() for actor in actors[1:]]))
        return worker

    def remove_worker(self, worker: int) -> None:
        """Have a worker leave; the piece of data that it is at goes to others."""
        for group in self._groups:
            if group.worker == worker:
                group.leaving = True
                self._get(self.coordinator.leave.remote(worker, "asked to", False))

    def wait(
        self, show: Callable[[Progress], None] = lambda progress: None, stopped: Callable[[], bool] = lambda: False
    ) -> End:
        """Until the run is over; `show` is called about twice a second, and `stopped` says whether to end early."""
        ray = self._ray
        end, progress, asked = self.coordinator.end.remote(), self.coordinator.progress.remote(), False
        while True:
            waiting = [end, progress, *(ref for group in self._groups for ref in (group.life, *group.watches))]
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
            for group in [g for g in self._groups if {g.life, *g.watches} & set(ready)]:
                self._gone(group)
            if stopped() and not asked:
                asked = True
                self.coordinator.stop.remote()

    def close(self) -> None:
        """End all actors."""
        others = [self.coordinator, *self.servers, *([self.evaluator] if self.evaluator is not None else [])]
        for actor in [*(actor for group in self._groups for actor in group.actors), *others]:
            self._ray.kill(actor, no_restart=True)
        self._groups = []
        shutil.rmtree(self._snapshots, ignore_errors=True)  # they are for as long as the servers

    def _gone(self, group: _Group) -> None:
        """A worker has ended: it left, or has nothing to do, or it was killed and is replaced."""
        ray = self._ray
        why = "its process has ended"
        if not group.watches or ray.wait([group.life], timeout=0)[0]:
            try:
                refused = self._get(group.life)
                if isinstance(refused, Refused):
                    raise PlanError(refused.why)
                ends = group.leaving or self._get(self.coordinator.is_ending.remote())
                why = "" if ends else "the coordinator did not know it any more"
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

    def _get(self, reference: Any) -> Any:
        """What a call returned. What it raised as it was raised there; WorldError for a process that is gone."""
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


__all__ = ["Running"]


def _in_words(error: Any) -> str:
    """What a call raised, and where."""
    places = re.findall(r'File "([^"]+)", line (\d+)', str(error))
    where = f" ({places[-1][0]}:{places[-1][1]})" if places else ""
    return f"{type(error.cause).__name__}: {error.cause}{where}"
