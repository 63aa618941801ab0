"""plait train with parameter servers: makes the Job of a config, runs it, and shows its progress."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from plait.api.job.config import Config
from plait.api.job.from_config import (
    ANEW,
    Resume,
    checkpoint_folder,
    make_data,
    make_model,
    make_out,
    optimizer_factory,
    scheduler_factory,
)
from plait.api.job.metrics import MetricsLog, Reporter
from plait.api.job.training import Outcome
from plait.comm.process_world import process_world
from plait.comm.stop_vote import StopVote
from plait.cost.memory_model import human_bytes
from plait.engine.checkpoint.checkpoint_folders import has_checkpoints
from plait.engine.checkpoint.storage import folder_of
from plait.engine.checkpoint.write import clean
from plait.engine.trace_folder import write_plan
from plait.integrations.ray_servers.full_model import FullModel
from plait.integrations.ray_servers.messages import Progress
from plait.integrations.ray_servers.ray_cluster import check_installed, cluster
from plait.integrations.ray_servers.server_job import Job, check_plan, make_job
from plait.integrations.ray_servers.supervisor import RunSupervisor
from plait.plan.plan import Plan

_WORKERS = "workers"  # a file in a run's folder, into which a user may write a new number of workers


def check_served(config: Config, plan: Plan) -> None:
    """Raise PlanError for what parameter servers do not support, and if Ray is not installed."""
    check_plan(plan, config.train.batch_size)
    check_installed()


def run_served(config: Config, plan: Plan, resume: Resume = ANEW) -> Outcome:
    """Train under a plan with servers, on this machine or on the Ray cluster at RAY_ADDRESS."""
    job = served_job(config, plan, resume)
    clean(folder_of(job.folder))
    if job.resume:
        FullModel(job).check()  # before anything starts
    started = time.monotonic()
    out, world = make_out(config), process_world(Plan().mesh, device="cpu")
    wanted = out / _WORKERS
    wanted.unlink(missing_ok=True)
    write_plan(out, None, world, str(plan))
    with cluster(job) as ray, StopVote(world) as vote:
        shown: _Shown | None = None
        running = RunSupervisor(ray, job)
        try:
            shown = _Shown(config, running, time.monotonic() - started, job.resume)
            end = running.wait(functools.partial(_show, shown, running, wanted), lambda: vote.should_stop(0))
            shown.close(f"stopped after step {end.step}; --resume goes on from there" if end.stopped else None)
        except KeyboardInterrupt:
            if shown is not None:
                after = "--resume goes on from the last" if has_checkpoints(job.folder) else "there is no"
                shown.close(f"stopped at once; {after} checkpoint")
            raise
        finally:
            running.close()
    return Outcome(end.step, end.loss, end.stopped, vote.number)


def served_job(config: Config, plan: Plan, resume: Resume = ANEW) -> Job:
    """The Job that a config and a plan describe."""
    folder = _absolute(checkpoint_folder(config))
    resume = resume.settled(folder)
    train = config.train
    data = make_data(config)
    return make_job(
        plan,
        make_model=functools.partial(_at, os.getcwd(), make_model, config),
        make_data=functools.partial(_at, os.getcwd(), _datasets, config),
        optimizer=optimizer_factory(config),
        scheduler=scheduler_factory(config),
        num_items=len(data.train),
        batch_size=train.batch_size,
        steps=train.steps,
        out=str(Path(train.out).absolute()),
        folder=folder,
        begins_at=resume.place(folder) if resume.wanted else "",
        make_log=functools.partial(_log, str(Path(train.out).absolute()), train.tensorboard, str(plan)),
        layouts=config.layouts,
        seed=train.seed,
        clip_norm=train.clip_norm,
        save_every=train.save_every,
        evaluate_every=train.evaluate_every if data.held_out is not None else 0,
        evaluate_batches=train.evaluate_batches,
        keep=train.keep,
        resume=resume.wanted,
        on_nan=train.on_nan,
        scratch=train.scratch,
        num_threads=max(1, (os.cpu_count() or 1) // (plan.workers * plan.inner_plan.num_processes)),
    )


def _at(folder: str, make: Callable[[Config], Any], config: Config) -> Any:
    """Call `make` in the folder in which the job was started, if this process has it, so that its modules are found."""
    if Path(folder).is_dir():
        os.chdir(folder)
    return make(config)


def _datasets(config: Config) -> tuple[Any, Any]:
    data = make_data(config)
    return data.train, data.held_out


def _log(out: str, tensorboard: bool, plan: str, first_step: int) -> MetricsLog:
    return MetricsLog(Path(out), first_step, tensorboard, plan)


def _absolute(folder: object) -> str:
    text = str(folder)
    return text if "://" in text else str(Path(text).absolute())


def _show(shown: _Shown, running: RunSupervisor, wanted: Path, progress: Progress) -> None:
    shown(progress)
    if wrong := _resize(running, wanted):
        shown.say(wrong)


def _resize(running: RunSupervisor, wanted: Path) -> str:
    """Change the number of workers to the one in the file `wanted`, if it exists, and remove the file.

    Returns a message for the user if the file holds no number.
    """
    try:
        text = wanted.read_text(encoding="utf-8")
    except OSError:
        return ""
    wanted.unlink()
    if not text.strip().isdecimal() or int(text) < 1:
        return f"{wanted} held {text.strip()!r}, and was removed; write the number of workers into it, 1 or more"
    here = sorted(running.workers)
    for _ in range(int(text) - len(here)):
        running.add_worker()
    for worker in here[int(text) :]:
        running.remove_worker(worker)
    return ""


class _Shown:
    """Shows the progress of a run with parameter servers."""

    def __init__(self, config: Config, running: RunSupervisor, seconds: float, resume: bool) -> None:
        self._reporter = Reporter(config.train.steps, running.first_step)
        job = running.job
        num, servers = sum(v.num_bytes for v in job.variables), job.plan.servers
        self._reporter.say(
            f"{human_bytes(num)} of variables on {servers} server{'s' * (servers > 1)}, plan {job.plan.title}, started"
            f" after {seconds:.1f} s" + (f"; going on after step {running.first_step}" if resume else "")
        )
        self._out = config.train.out
        self._last = (running.first_step, 0, time.monotonic())

    def __call__(self, progress: Progress) -> None:
        for message in progress.messages:
            self._reporter.say(message)
        step, tokens, since = self._last
        if progress.step > step:
            now = time.monotonic()
            if progress.tokens > tokens:  # else the coordinator was restarted, and counts from 0
                self._reporter.step(progress.step, progress.loss, progress.tokens - tokens, now - since)
            self._last = (progress.step, progress.tokens, now)

    def say(self, text: str) -> None:
        self._reporter.say(text)

    def close(self, text: str | None) -> None:
        self._reporter.close()
        self._reporter.say(text or f"done: checkpoint and metrics are in {self._out}")
