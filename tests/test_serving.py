"""Parameter servers as processes of Ray: runs in which everything is killed once, and workers of several ranks."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from plait.run.saving.places import newest
from plait.serve.cluster import load_ray, start_here
from plait.serve.notes import Note, Progress, Refused
from plait.serve.rehearse import rehearse
from plait.serve.running import Running
from plait.serve.whole import Whole
from plait.trainer import Trainer
from tests.served import NUM_IDS, KeptLog, job_of, make_click, make_clicks, make_model


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    found = load_ray()
    start_here(found, 12, 128 << 20)
    yield found
    found.shutdown()


class Script:
    """Acts on a run while it goes on: each act once its condition holds, one after the other; then it is stopped."""

    def __init__(self, ray: Any, running: Running) -> None:
        self.ray, self.running = ray, running
        self.acts: list[tuple[Callable[[Progress], bool], Callable[[Progress], None]]] = []
        self.done = 0
        self._mark = 0

    def after(self, steps: int, act: Callable[[], Any]) -> None:
        """That many steps after the act before."""

        def do(progress: Progress) -> None:
            act()
            self._mark = progress.step

        self.acts.append((lambda progress: progress.step >= self._mark + steps, do))

    def __call__(self, progress: Progress) -> None:
        if self.done < len(self.acts) and self.acts[self.done][0](progress):
            self.acts[self.done][1](progress)
            self.done += 1

    def over(self) -> bool:
        return self.done == len(self.acts)

    def kill(self, actor: Any, number: signal.Signals = signal.SIGKILL) -> None:
        os.kill(self.ray.get(actor.pid.remote()), number)


def test_everything_is_killed_once(ray: Any, tmp_path: Path) -> None:
    job = job_of(
        "workers=2 servers=2", tmp_path, make_model=make_click, make_data=make_clicks, steps=10**6, scheduler=None,
        save_every=10,
    )  # fmt: skip
    running = Running(ray, job)
    script, chief = Script(ray, running), running.chief
    stopped: list[int] = []

    def stop_one() -> None:
        worker = min(running.workers)
        stopped.append(ray.get(running.workers[worker][0].pid.remote()))
        os.kill(stopped[0], signal.SIGSTOP)

    other = dataclasses.replace(job.fingerprint, plan="tensor=2")
    fake = Note(99, "another", 0, 0.0, 1.0, 1)
    try:
        script.after(3, lambda: refused.append(ray.get(chief.join.remote(98, other))))
        script.after(0, lambda: chief.push.remote(fake, [None, None]))
        script.after(1, lambda: script.kill(running.workers[0][0]))
        script.after(5, lambda: script.kill(running.servers[0]))
        script.after(5, lambda: script.kill(chief))
        script.after(5, running.add_worker)
        script.after(5, lambda: running.remove_worker(max(running.workers)))
        script.after(5, stop_one)
        script.after(5, lambda: os.kill(stopped[0], signal.SIGCONT))  # the others went on meanwhile
        script.after(12, lambda: None)
        refused: list[Any] = []
        end = running.wait(script, script.over)
        totals = ray.get(chief.totals.remote())
    finally:
        running.close()
    assert isinstance(refused[0], Refused) and "its plan is 'tensor=2'" in refused[0].why
    assert end.stopped and end.step >= 40
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    said = " | ".join(event["message"] for event in events)
    assert "worker 0 is gone (its process has ended" in said and "the chief came back, at update" in said
    assert "server 0 came back from its last snapshot" in said and "worker 99 is no member" in said
    assert sum(event.get("updates_lost", 0) for event in events) >= totals.get("updates_lost", 0)
    whole = Whole(job)
    whole.load()
    assert whole.step == end.step and newest(job.folder)
    assert 0 < len(whole.tables["table"]["ids"]) <= NUM_IDS and whole.tables["table"]["values"].isfinite().all()


def test_workers_of_two_ranks_in_step_are_data_parallel(ray: Any, tmp_path: Path) -> None:
    order = (1, 0, 0, 1, 1, 0)
    plan = "workers=2 servers=2 staleness=0"
    expected = rehearse(job_of(plan, tmp_path / "one", clip_norm=0.5), order).values
    job = job_of(f"{plan} tensor=2", tmp_path / "two", clip_norm=0.5, steps=3, order=order, evaluate_every=3)
    job = dataclasses.replace(job, make_log=functools.partial(KeptLog, tmp_path))
    running = Running(ray, job)
    try:
        end = running.wait()
    finally:
        running.close()
    assert end.step == 3 and not end.stopped
    trainer = Trainer(*make_model(), job.optimizer, "", scheduler=job.scheduler)
    trainer.prepare(torch.utils.data.default_collate([job.make_data()[0][i] for i in range(12)]))
    trainer.load(job.folder)
    for name, value in trainer.full_state_dict().items():
        torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6)
    held_out = trainer.evaluate(torch.utils.data.default_collate([job.make_data()[1][i] for i in range(48)]))
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 3]
    assert lines[-1]["held_out_loss"] == pytest.approx(held_out, rel=1e-5)
    assert lines[0]["staleness"] == {"0": 2} and lines[0]["lr"] == 0.05 and lines[1]["lr"] == 0.025
    trainer.close()
