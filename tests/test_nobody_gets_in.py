"""Nobody gets in: what listens where while plait runs, and what another user of the host can do to it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch.distributed as dist
from comm_worlds import Script, environment, free_port
from intruder import attack, below, is_loopback, listening, needs_proc, needs_root

from plait.comm.private_folder import is_ours_alone, private_folder

JOB = """
[model]
layers = 1
width = 16
heads = 2
sequence = 16
[data]
source = "text.txt"
[train]
steps = 1000000
batch_size = 4
out = "run"
save_every = 0
"""
SCRIPT = """
import functools, os, pathlib, time, torch, torch.distributed as dist, plait
class Stops(torch.nn.Linear):  # cannot be captured: trains under DDP
    def forward(self, x):
        return super().forward(x) if float(x.sum()) > -1e9 else x
if "MASTER_PORT" in os.environ and "PLAIT_RANKS_FOLDER" in os.environ:
    dist.init_process_group("gloo")
sgd = functools.partial(torch.optim.SGD, lr=1e-6)  # a loss that comes down to rounding is refused in the end
trainer = plait.Trainer(Stops(4, 4), lambda model, x: model(x).square().mean(), sgd, os.environ["PLAN"])
while True:
    trainer.step(torch.ones(8, 4))
    pathlib.Path("running." + os.environ["RANK"]).touch()
    time.sleep(0.02)  # what is looked at meanwhile does not depend on how many steps there are
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.toml").write_text(JOB)
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "text.txt").write_text("It was a bright cold day in April. " * 40)
    for name in [*os.environ]:
        if name in environment(0, 1, 1) or name.startswith(("PLAIT_", "RAY_", "TORCHELASTIC", "GLOO_")):
            monkeypatch.delenv(name)
    return tmp_path


@contextmanager
def running(command: list[str], begun: Callable[[], bool], **variables: str) -> Iterator[list[int]]:
    """The command, once it trains: the numbers of its processes."""
    with open("errors", "w+") as errors:
        process = subprocess.Popen(
            [sys.executable, *command], env=os.environ | variables, stdout=errors, stderr=errors, start_new_session=True
        )
        try:
            while not begun():
                errors.seek(0)
                assert process.poll() is None, errors.read()
                time.sleep(0.05)
            yield below(process.pid)
        finally:
            process.kill()
            process.wait()


def started(num: int) -> Callable[[], bool]:
    return lambda: all(Path(f"running.{rank}").exists() for rank in range(num))


def logged() -> bool:
    path = Path("run/metrics.jsonl")
    return path.exists() and path.stat().st_size > 0


@needs_proc
@needs_root
def test_the_attack_is_one() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listens:
        port: int = listens.getsockname()[1]
        store = dist.TCPStore("127.0.0.1", port, is_master=True, master_listen_fd=os.dup(listens.fileno()))
        store.set("key", "text")
        with private_folder("x"):
            found = attack([os.getpid()])
        assert found == [f"the store at port {port}"]
        assert store.get("key") != b"text"


@needs_proc
@needs_root
def test_ranks_of_plait_train_are_out_of_reach(folder: Path) -> None:
    with running(["-m", "plait", "train", "job.toml", "--plan", "data=2"], logged) as pids:
        look_around(pids)
    assert not (folder / "planted").exists()


@needs_proc
@needs_root
def test_a_script_that_joins_by_itself_is_out_of_reach_and_ends_with_its_launcher(folder: Path) -> None:
    with running(["-m", "plait", "run", "script.py", "--processes", "2"], started(2), PLAN="data=2") as pids:
        look_around(pids)
        (left,) = {Path(path) for path in _variables(pids[1], "PLAIT_RANKS_FOLDER")}
        assert is_ours_alone(left) and is_ours_alone(left.parent)
        os.kill(pids[0], signal.SIGKILL)
        end = time.monotonic() + 20
        while any(_state(pid) not in "ZX" for pid in pids[1:]):
            assert time.monotonic() < end
            time.sleep(0.05)
    assert not (folder / "planted").exists()
    assert left.exists()
    with private_folder("other") as mine:
        assert not left.exists() and is_ours_alone(mine)
        with private_folder("other") as another:
            assert mine.exists() and another.exists()
    assert not mine.exists()


def look_around(pids: list[int]) -> None:
    """Who listens, and what another user gets hold of; the ranks go on."""
    assert len(pids) == 3
    assert [one for one in listening(pids) if not is_loopback(one[0])] == []
    assert attack(pids) == []
    time.sleep(0.2)
    assert below(pids[0]) == pids


@needs_proc
def test_ranks_that_meet_at_the_loopback_address_listen_there(folder: Path) -> None:
    port = free_port()
    here = f"import os; os.chdir({str(folder)!r}); os.environ['PLAN'] = 'data=2'\n"
    (folder / "output").mkdir()
    scripts = [Script(here + SCRIPT, rank, 2, port, folder / "output") for rank in range(2)]
    try:
        while not started(2)():
            assert all(script.process.is_alive() for script in scripts), [script.outcome() for script in scripts]
            time.sleep(0.05)
        found = listening([script.process.pid for script in scripts])
        assert ("127.0.0.1", port) in found
        assert [one for one in found if not is_loopback(one[0])] == []
    finally:
        for script in scripts:
            script.process.kill()
            script.process.join()


def _variables(pid: int, name: str) -> list[str]:
    words = Path(f"/proc/{pid}/environ").read_text().split("\0")
    return [word.partition("=")[2] for word in words if word.startswith(f"{name}=")]


def _state(pid: int) -> str:
    """As /proc has it: Z and X are of those that have ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


def test_a_folder_that_another_user_has_taken_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("plait.comm.private_folder._shared", lambda: tmp_path)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    own = tmp_path / f"plait-{os.geteuid()}"
    own.symlink_to(elsewhere)
    with private_folder("x") as found:
        assert own not in found.parents and not [*elsewhere.iterdir()] and is_ours_alone(found.parent)
    own.unlink()
    own.mkdir(mode=0o755)
    own.chmod(0o777)
    with private_folder("x") as found:
        assert own not in found.parents
