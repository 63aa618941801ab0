"""Parameter servers as processes of Ray: runs in which everything is killed once, and workers of several ranks."""

from __future__ import annotations

import dataclasses
import http.client
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from forked_workers import forked_workers
from intruder import attack, below, is_loopback, listening, needs_proc, needs_root
from metrics_file import read_metrics
from test_train_job import JOB

from plait.api.job.config import Config, load_config
from plait.api.job.from_config import GO_ON
from plait.api.job.server_training import run_served, served_job
from plait.api.job.training import run_job
from plait.api.trainer import Trainer
from plait.comm.private_folder import private_folder
from plait.engine.checkpoint.checkpoint_folders import newest
from plait.errors import CheckpointError
from plait.integrations.ray_servers.full_model import FullModel
from plait.integrations.ray_servers.messages import Note, Progress, Refused
from plait.integrations.ray_servers.ray_cluster import load_ray, started_here
from plait.integrations.ray_servers.served_check import run_in_one_process
from plait.integrations.ray_servers.supervisor import RunSupervisor
from plait.plan.plan import Plan
from tests.served import NUM_IDS, job_of, make_click, make_clicks, make_data, make_slow_clicks, make_slow_data

# A dozen processes start in each, which takes a while on two cores that do other things as well.
pytestmark = [pytest.mark.timeout(500), pytest.mark.xdist_group("ray")]  # which is started once, for all of them


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch, private_folder("forks") as folder, forked_workers(folder) as command:
        patch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", json.dumps({"runtime_env": {"py_executable": command}}))
        with started_here(load_ray(), 5, 128 << 20) as found:
            yield found


class Script:
    """Acts on a run while it goes on: each act once its condition holds, one after the other; then it is stopped."""

    def __init__(self, ray: Any, running: RunSupervisor) -> None:
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
        "workers=2 servers=2 overlap=1", tmp_path, make_model=make_click, make_data=make_slow_clicks, steps=10**6,
        scheduler=None, save_every=10,
    )  # fmt: skip
    running = RunSupervisor(ray, job)
    script, coordinator = Script(ray, running), running.coordinator
    stopped: list[int] = []

    def stop_one() -> None:
        worker = min(running.workers)
        stopped.append(ray.get(running.workers[worker][0].pid.remote()))
        os.kill(stopped[0], signal.SIGSTOP)

    other = dataclasses.replace(job.fingerprint, plan="tensor=2")
    fake = Note(99, 1, "another", 0, 0, 0.0, 1.0, 1)
    try:
        script.after(3, lambda: refused.append(ray.get(coordinator.join.remote(98, other))))
        script.after(0, lambda: coordinator.push.remote(fake, [None, None]))
        script.after(1, lambda: script.kill(running.workers[0][0]))
        script.after(5, lambda: script.kill(running.servers[0]))
        script.after(5, lambda: script.kill(coordinator))
        script.after(5, running.add_worker)
        script.after(5, lambda: running.remove_worker(max(running.workers)))
        script.after(5, stop_one)
        script.after(5, lambda: os.kill(stopped[0], signal.SIGCONT))  # the others went on meanwhile
        script.after(12, lambda: None)
        refused: list[Any] = []
        end = running.wait(script, script.over)
        totals = ray.get(coordinator.totals.remote())
    finally:
        running.close()
    assert isinstance(refused[0], Refused) and "its plan is 'tensor=2'" in refused[0].why
    assert end.stopped and end.step >= 40
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    said = " | ".join(event["message"] for event in events)
    assert "worker 0 is gone (its process has ended" in said and "the coordinator came back, at update" in said
    assert "server 0 came back from its last snapshot" in said and "worker 99 is no member" in said
    assert sum(event.get("updates_lost", 0) for event in events) >= totals.get("updates_lost", 0)
    whole = FullModel(job)
    whole.load()
    assert whole.step == end.step and newest(job.folder)
    trainer = Trainer(*make_click(), job.optimizer, "data=1")
    trainer.prepare(torch.utils.data.default_collate([make_clicks()[0][index] for index in range(12)]))
    with pytest.raises(CheckpointError, match="rows of the tables table as servers hold them; go on under a plan with"):
        trainer.load(job.folder)
    trainer.close()
    assert 0 < len(whole.tables["table"]["ids"]) <= NUM_IDS and whole.tables["table"]["values"].isfinite().all()


@pytest.mark.parametrize("plan", ["overlap=2 staleness=3", "compress=topk:0.1 overlap=1"])
def test_a_run_in_a_given_order_is_its_definition(ray: Any, tmp_path: Path, plan: str) -> None:
    order = (0, 1, 0, 0, 1, 1, 0, 1, 1, 0, 1, 0)
    job = job_of(f"workers=2 servers=2 {plan}", tmp_path, steps=6, order=order, scheduler=None)
    running = RunSupervisor(ray, job)
    try:
        assert running.wait().step == 6
    finally:
        running.close()
    whole = FullModel(job)
    whole.load()
    expected = run_in_one_process(dataclasses.replace(job, out=str(tmp_path / "again")), order)
    for name, value in expected.values.items():
        torch.testing.assert_close(whole.shard.parameters[name].detach(), value, rtol=1e-5, atol=1e-6)


def test_a_run_goes_from_one_device_to_servers_and_back(ray: Any, tmp_path: Path, monkeypatch: Any) -> None:
    """In step, with two workers of two ranks each, it has the losses of a run that was on one device all along."""
    monkeypatch.chdir(tmp_path)
    Path("job.toml").write_text(JOB)
    Path("text.txt").write_text("The quick brown fox jumps over the lazy dog while it rains. " * 40)

    def config(out: str, steps: int) -> Config:
        changes = ["model.dropout=0", "scheduler.name=constant", "scheduler.warmup=5", "train.save_every=0"]
        changes += ["train.evaluate_every=6", "sample.length=0", f"train.out={out}", f"train.steps={steps}"]
        return load_config("job.toml", changes)

    run_job(config("one", 8), Plan())
    run_job(config("two", 3), Plan())
    plan = Plan.parse("workers=2 servers=1 staleness=0 tensor=2")
    assert run_served(config("two", 6), plan, GO_ON).step == 6
    run_job(config("two", 8), Plan(), GO_ON)
    one, two = (read_metrics(tmp_path / out / "metrics.jsonl") for out in ("one", "two"))
    held_out = [line for line in two if "loss" not in line]
    two = [line for line in two if "loss" in line]
    assert [line["step"] for line in two] == list(range(1, 9))
    for key in ("loss", "lr"):
        assert [line[key] for line in two] == pytest.approx([line[key] for line in one], rel=1e-5)
    assert held_out == [{"step": 6, "held_out_loss": pytest.approx(one[5]["held_out_loss"], rel=1e-5)}]
    size = sum(v.num_bytes for v in served_job(config("two", 6), plan).variables)
    assert two[4]["bytes_moved"] == pytest.approx(2 * 2 * size, rel=0.05), "of two workers, values and gradients once"
    assert two[4]["staleness"] == {"0": 2} and two[4]["updates"] == 1 and two[4]["workers"] == 2


def test_local_sgd_with_workers_that_come_and_go(ray: Any, tmp_path: Path) -> None:
    plan = "workers=3 servers=2 staleness=0 sync=4 outer=nesterov compress=int8"  # as many as there is room for
    job = job_of(plan, tmp_path, make_data=make_slow_data, steps=10**6, save_every=10)
    running = RunSupervisor(ray, job)
    script = Script(ray, running)
    try:
        script.after(8, lambda: script.kill(running.workers[0][0]))
        script.after(8, running.add_worker)
        script.acts.append((lambda progress: progress.workers == 4, lambda progress: None))
        script.after(8, lambda: running.remove_worker(min(running.workers)))
        script.after(8, lambda: None)
        end = running.wait(script, script.over)
    finally:
        running.close()
    assert end.stopped and end.step % 4 == 0 and not end.error
    said = (tmp_path / "events.jsonl").read_text()
    assert "worker 0 is gone (its process has ended" in said and "worker 4 has joined" in said and "has left" in said
    model, loss_fn = job.make_model()
    trainer = Trainer(model, loss_fn, job.optimizer, "data=1", scheduler=job.scheduler)
    rows = torch.utils.data.default_collate([job.make_data()[0][index] for index in range(12)])
    trainer.prepare(rows)
    trainer.load(job.folder)  # with the moments of one of the workers
    assert trainer.step_number == end.step and trainer.evaluate(rows) < 10
    trainer.close()
    again = dataclasses.replace(job, make_data=make_data, resume=True, steps=end.step + 6, name="again")
    running = RunSupervisor(ray, again)
    try:
        assert running.first_step == end.step
        end = running.wait()
    finally:
        running.close()
    assert end.step == again.steps and not end.error, "the last round is shorter"


def test_a_worker_that_stands_still_is_waited_for_at_the_bound(ray: Any, tmp_path: Path) -> None:
    job = job_of("workers=2 servers=1 staleness=4", tmp_path, make_data=make_slow_data, steps=10**6)
    running = RunSupervisor(ray, job)
    script = Script(ray, running)
    pid = ray.get(running.workers[0][0].pid.remote())
    reached: list[int] = []

    def stand_still() -> None:
        os.kill(pid, signal.SIGSTOP)
        while len(reached) < 2 or reached[-1] != reached[-2]:
            reached.append(ray.get(running.coordinator.progress.remote()).step)
            time.sleep(1.0)

    try:
        script.after(3, stand_still)
        script.after(0, lambda: os.kill(pid, signal.SIGCONT))
        script.after(5, lambda: None)
        end = running.wait(script, script.over)
    finally:
        running.close()
    # The other may have been 5 pushes behind, and is then at most 5 ahead; one of the worker's own was under way.
    assert reached[-1] - reached[0] <= 6, "2 pushes are a step"
    assert end.step >= reached[-1] + 5


@needs_proc
@needs_root
def test_nobody_gets_into_ray(ray: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    job = job_of("workers=1 servers=1 tensor=2", tmp_path, make_data=make_slow_data, steps=10**6)
    running = RunSupervisor(ray, job)
    script = Script(ray, running)
    listens: list[tuple[str, int]] = []
    found: list[str] = []

    def look() -> None:
        pids = below(os.getpid())
        listens.extend(listening(pids))
        found.extend(attack(pids))

    try:
        script.after(1, look)
        script.after(2, lambda: None)
        running.wait(script, script.over)
    finally:
        running.close()
    assert script.done == 2 and found == [] and not (tmp_path / "planted").exists()
    assert len(listens) > 5 and [one for one in listens if not is_loopback(one[0])] == []
    assert asked(ray.get_runtime_context().gcs_address) == "AuthenticationError"
    assert {status for status in map(posted, {port for _, port in listens}) if status} == {401}


def asked(address: str) -> str:
    """What the keeper of a Ray cluster says to one who has another token."""
    source = (
        "from ray._raylet import GcsClient\n"
        f"try: GcsClient(address={address!r}).internal_kv_keys(b'', None)\n"
        "except Exception as error: print(type(error).__name__)"
    )
    variables = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64}
    done = subprocess.run([sys.executable, "-c", source], env=variables, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def posted(port: int) -> int:
    """The status of an answer to one who asks for an environment to be made; 0 of what speaks no HTTP."""
    try:
        with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=1)) as line:
            line.request("POST", "/get_or_create_runtime_env", b"")
            with closing(line.getresponse()) as reply:
                return reply.status
    except (OSError, http.client.HTTPException):
        return 0


@needs_proc
def test_nothing_of_ray_outlives_a_launcher_that_is_killed(tmp_path: Path) -> None:
    source = (
        "import time\n"
        "from plait.integrations.ray_servers.ray_cluster import load_ray, started_here\n"
        "with started_here(load_ray(), 1, 128 << 20):\n"
        "    open('started', 'w').close()\n"
        "    time.sleep(600)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", source], cwd=tmp_path)
    while not (tmp_path / "started").exists():
        assert process.poll() is None
        time.sleep(0.1)
    pids: list[int] = []
    while not any("Agent" in name_of(pid) for pid in pids):
        pids = below(process.pid)
        time.sleep(0.1)
    time.sleep(1.5)  # the reaper looks twice a second
    pids = below(process.pid)
    process.kill()
    process.wait()
    end = time.monotonic() + 30  # of a minute that an agent would take
    while any(map(name_of, pids)):
        assert time.monotonic() < end, [name_of(pid) for pid in pids]
        time.sleep(0.1)


def name_of(pid: int) -> str:
    """The command of a process; empty of one that has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""
