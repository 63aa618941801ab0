"""The training job: what every rank of `plait train` runs."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from plait.api.job.config import Config
from plait.api.job.from_config import (
    ANEW,
    Data,
    Resume,
    checkpoint_folder,
    hold_out,
    make_data,
    make_model,
    make_out,
    optimizer_factory,
    scheduler_factory,
)
from plait.api.job.gpt import BytesGPT, sample_text
from plait.api.job.metrics import MetricsLog, Reporter, compile_progress, printable
from plait.api.trainer import StepEnd, Trainer
from plait.backends.choose import compile_report
from plait.comm.failure import guard
from plait.comm.monitor import TIMEOUT
from plait.comm.stop_vote import StopVote
from plait.compile.capture.loss_values import loss_and_aux
from plait.engine.checkpoint.barrier import Barrier
from plait.engine.checkpoint.storage import folder_of
from plait.engine.checkpoint.write import clean
from plait.engine.data.loader import Loader
from plait.engine.local_batch import num_tokens
from plait.errors import CheckpointError
from plait.plan.plan import Plan
from plait.schedule.sync_rounds import SyncRounds
from plait.spec.text_files import open_in_run


@dataclass(frozen=True)
class Outcome:
    """The end of a job: its last step, the loss of that step, whether it was stopped before all steps were done, and by
    which signal."""

    step: int
    loss: float
    stopped: bool
    signal: int = signal.SIGINT


def run_job(config: Config, plan: Plan, resume: Resume = ANEW, trace: bool = False) -> Outcome:
    """Train as `config` says, as one rank of `plan`. Every rank calls it, with a config that `check_job` has checked.

    With `trace` every rank records its last steps for `plait report`.
    """
    if config.train.timeout is not None:
        os.environ.setdefault(TIMEOUT, str(config.train.timeout))
    model, loss_fn = make_model(config)
    train = config.train
    ends: list[StepEnd] = []
    trainer = Trainer(
        model,
        loss_fn,
        optimizer_factory(config),
        plan,
        layouts=config.layouts,
        seed=train.seed,
        clip_norm=train.clip_norm,
        scheduler=scheduler_factory(config),
        on_nan=train.on_nan,
        scratch=train.scratch,
        trace=train.out if trace else None,
        callbacks=[ends.append],
        noise_every=train.noise_every,
    )
    try:
        with guard(trainer.world):
            return _Job(config, trainer, make_data(config), ends).run(resume)
    finally:
        trainer.close()


class _Job:
    """One rank's loop over steps. Rank 0 has the log and the reporter."""

    def __init__(self, config: Config, trainer: Trainer, data: Data, ends: list[StepEnd]) -> None:
        self.config, self.trainer, self.data, self.ends = config, trainer, data, ends
        self.folder = checkpoint_folder(config)
        self.held: int | None = None  # the lock of the run's folder, on rank 0
        self.log: MetricsLog | None = None
        self.reporter: Reporter | None = None
        self.loaders: list[Loader] = []
        self.held_out: Loader | None = None
        self.num_sent = 0  # bytes that this rank has sent so far

    def run(self, resume: Resume) -> Outcome:
        try:
            with StopVote(self.trainer.world, self._meet_after) as vote:
                loader = self._start(resume)
                return self._steps(loader, vote)
        finally:
            for loader in self.loaders:
                loader.close()
            if self.log is not None:
                self.log.close()
            if self.reporter is not None:
                self.reporter.close()
            if self.held is not None:
                os.close(self.held)

    def _meet_after(self, step: int) -> int:
        """The first step at whose beginning a rank knows that all ranks have begun `step`."""
        plan = self.trainer.plan
        if plan.relaxed_axis and plan.sync != 1:
            return SyncRounds.of(plan).meeting_after(step)
        return step + 1

    def _start(self, resume: Resume) -> Loader:
        """Capture the step, place or load the parameters, open the log. Returns the loader at its position."""
        config, trainer = self.config, self.trainer
        started = time.monotonic()
        loader = self._loader(self.data.train, shuffle=True)
        with compile_progress() if trainer.world.rank == 0 else contextlib.nullcontext():
            trainer.prepare(next(iter(self._loader(self.data.train, shuffle=True, ahead=False))))
        begins = Barrier(trainer.world)
        try:
            place = begins.on_first_rank("resume", lambda: self._prepare_folder(resume))
        except CheckpointError as error:  # such as a folder that another run has taken since the job was checked
            error.status = 2
            raise
        if place:
            loader.load_state_dict(trainer.load(place).get("data", {}))
        first = trainer.step_number
        if trainer.world.rank == 0:
            out = make_out(config)
            if trainer.engine.recorder is None:  # else the recorder's start has written it
                trainer.write_plan(out)
            self.log = MetricsLog(out, first + 1, config.train.tensorboard, str(trainer.plan) or "one device")
            self.reporter = Reporter(config.train.steps, first)
            parameters = sum(torch.Size(layout.shape).numel() for layout in trainer.layouts.values())
            self.reporter.say(
                f"{parameters:,} parameters, plan {trainer.plan.title}, ready after {time.monotonic() - started:.1f} s"
                + (f"; going on after step {first}" if place else "")
            )
            if trainer.sharded_fraction is not None:
                self.reporter.say(str(trainer.sharded_fraction))
            compiled = trainer.executor.compiled
            if compiled is not None and (report := compile_report(compiled.program)) is not None:
                self.reporter.say(str(report))
        return loader

    def _prepare_folder(self, resume: Resume) -> str:
        """Hold the folder and remove the files of killed saves, on rank 0. Returns the checkpoint to load, or ""."""
        self.held = hold_out(self.config)
        resume = resume.settled(self.folder)
        with contextlib.suppress(OSError):  # the first save looks again, and says what is wrong
            clean(folder_of(self.folder))
        return resume.place(self.folder) if resume.wanted else ""

    def _steps(self, loader: Loader, vote: StopVote) -> Outcome:
        train, trainer = self.config.train, self.trainer
        batches = _endless(loader)
        loss, saved_at = float("nan"), -1
        while trainer.step_number < train.steps:
            if vote.should_stop(trainer.step_number):
                if trainer.step_number == 0:
                    self._say("stopped before the first step; nothing was saved")
                else:
                    self._save(loader)
                    self._say(f"stopped after step {trainer.step_number}; --resume goes on from there")
                return Outcome(trainer.step_number, loss, stopped=True, signal=vote.number)
            start = time.perf_counter()
            with trainer.span("data", "next"):
                batch = next(batches)
            assert trainer.optimizer is not None
            rate = float(trainer.optimizer.param_groups[0]["lr"])  # of this step; the scheduler changes it afterwards
            result, aux = loss_and_aux(trainer.step(batch))
            loss = float(result)
            seconds = time.perf_counter() - start
            step, tokens = trainer.step_number, num_tokens(batch)
            values: dict[str, float | int] = {
                "step": step,
                "loss": loss,
                "lr": rate,
                "tokens_per_s": tokens / seconds,
                "seconds": seconds,
                "data_seconds": loader.waited_seconds.last,
                "sent_bytes": self._sent(),
                **_numbers(aux, "aux/"),
            }
            if trainer.state.replicas is not None:
                values["agree_seconds"] = trainer.state.replicas.take_seconds()
            end = self.ends.pop()
            if (norm := end.gradient_norm) is not None:
                values["gradient_norm"] = norm
            if end.noise is not None:
                values |= {"noise_signal": end.noise.signal, "noise_trace": end.noise.noise}
            if end.noise is not None and end.noise_scale is not None:
                values["noise_scale"] = end.noise_scale
            last = step == train.steps
            if last:
                trainer.agree()
            if self.data.held_out is not None and train.evaluate_every and (last or step % train.evaluate_every == 0):
                with vote.pausing():
                    values |= self._evaluate()
            if self.log is not None and self.reporter is not None:
                self.log.write(values)
                self.reporter.step(step, loss, tokens, seconds)
                if "held_out_loss" in values:
                    self.reporter.say(f"step {step}  held-out loss {values['held_out_loss']:.3f}")
            if train.save_every and step % train.save_every == 0:
                with vote.pausing():
                    self._save(loader, wait=last)
                saved_at = step
        with vote.pausing():
            if saved_at != trainer.step_number:
                self._save(loader)
            self._finish()
        return Outcome(trainer.step_number, loss, stopped=False)

    def _loader(self, dataset: Any, shuffle: bool, ahead: bool = True) -> Loader:
        """A loader from the beginning of the data; without `ahead` it reads no batch before it is asked for."""
        loader = Loader(
            dataset,
            self.config.train.batch_size,
            shuffle=shuffle,
            seed=self.config.train.seed,
            plan=self.trainer.plan,
            world=self.trainer.world,
            num_workers=self.config.data.workers if ahead else 0,
            prefetch=self.config.data.prefetch if ahead else 0,
        )
        self.loaders.append(loader)
        return loader

    def _sent(self) -> int:
        """Bytes that this rank has sent since the last call."""
        world = self.trainer.world
        total = sum(world.comm(axis).links.total() for axis in world.mesh.communicators)
        sent, self.num_sent = total - self.num_sent, total
        return sent

    def _evaluate(self) -> dict[str, float]:
        """The loss, and its outputs that are numbers, on the first batches of the held-out data."""
        if self.held_out is None:
            self.held_out = self._loader(self.data.held_out, shuffle=False)
        self.held_out.load_state_dict(self.held_out.state_dict() | {"epoch": 0, "items": 0})
        loss, aux = loss_and_aux(self.trainer.evaluate(islice(self.held_out, self.config.train.evaluate_batches)))
        return {"held_out_loss": loss, **_numbers(aux, "held_out_aux/")}

    def _save(self, loader: Loader, wait: bool = True) -> None:
        self.trainer.save(self.folder, {"data": loader.state_dict()}, keep=self.config.train.keep, wait=wait)

    def _finish(self) -> None:
        """Print where the results are, and on rank 0 write a sample of text from the whole model."""
        section = self.config.sample
        if self.trainer.captures.again:
            self._say(f"the step was {self.trainer.captures}")
        self._say(f"done: checkpoint and metrics are in {self.config.train.out}")
        if self.config.model.name != "bytes_gpt" or not section.length:
            return
        weights = self.trainer.full_state_dict()
        if self.reporter is None:
            return
        model, _ = make_model(self.config)
        assert isinstance(model, BytesGPT)
        model.load_state_dict(weights)
        text = sample_text(model, section.prompt, section.length, section.temperature, self.config.train.seed)
        with open_in_run(Path(self.config.train.out) / "sample.txt") as file:
            file.write(text)
        self._say(f"a sample of what it learned:\n{printable(text)}")

    def _say(self, text: str) -> None:
        if self.reporter is not None:
            self.reporter.close()
            self.reporter.say(text)


def _endless(loader: Loader) -> Any:
    """Batch after batch, epoch after epoch."""
    while True:
        yield from loader


def _numbers(aux: dict[str, Tensor], prefix: str) -> dict[str, float]:
    """The outputs of a loss function that are single numbers."""
    return {f"{prefix}{name}": float(value) for name, value in aux.items() if value.numel() == 1}
