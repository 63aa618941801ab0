"""The command line: what it refuses before anything starts, and real runs on two processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from comm_worlds import ForkedPlait
from metrics_file import read_metrics
from typer.testing import CliRunner

from plait.api.cli import app
from plait.comm import launch
from plait.comm.launch import first_to_fail

SMALL = """
[model]
layers = 1
width = 16
heads = 2
sequence = 16
dropout = 0.1
[data]
source = "text.txt"
[train]
steps = 4
batch_size = 4
clip_norm = 1.0
out = "run"
[sample]
length = 8
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("RANK", "WORLD_SIZE", "PLAIT_PLAN", "PLAIT_TRACE", "PLAIT_FAILURE_FILE"):
        monkeypatch.setenv(name, "")  # what a command sets in this process goes with the test
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.toml").write_text(SMALL)
    (tmp_path / "text.txt").write_text(
        "It was a bright cold day in April, and the clocks were striking thirteen. " * 40
    )
    return tmp_path


@pytest.fixture
def _forked_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "subprocess", SimpleNamespace(Popen=ForkedPlait))


def plait(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "plait.api.cli", *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["train", "job.toml", "--plan", "data=3", "--processes", "4"], ["'data=3' is for 3 processes, not 4"]),
        (["train", "job.toml", "--plan", "dta=3"], ["unknown key 'dta'", "did you mean data?"]),
        (["train", "job.toml", "--plan", "data=3"], ["4 does not split over data=3"]),
        (["train", "job.toml", "--set", "train.steps=x"], ["--set: train.steps = 'x'", "a whole number"]),
        (["train", "none.toml"], ["there is no config file 'none.toml'"]),
        (["train", "job.toml", "--set", "data.source=none"], ["there is no text file or folder 'none'"]),
        (["train", "job.toml", "--resume"], ["there is no checkpoint in run/checkpoints", "--resume=auto begins anew"]),
        (["train", "job.toml", "--resume=maybe"], ["--resume=maybe is unknown; write --resume, or --resume=auto"]),
        (
            ["train", "job.toml", "--checkpoint", "step-7"],
            ["no checkpoint 'step-7' in run/checkpoints, which"],
        ),
        (["verify", "job.toml", "--plan", "schedule=foo"], ["bad value 'foo' in 'schedule=foo'", "gpipe"]),
        (["explain", "job.toml", "--plan", "data=0"], ["'data=0'", "1 or more"]),
        (["memory", "job.toml", "--limit", "16G"], ["cannot read --limit '16G'", "KiB, MiB, GiB"]),
        (["run", "none.py"], ["there is no script 'none.py'"]),
        (["run", "text.txt", "--processes", "2", "--plan", "tensor=3"], ["'tensor=3' is for 3 processes, not 2"]),
    ],
)
def test_bad_input_is_one_message(folder: Path, arguments: list[str], parts: list[str]) -> None:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith("plait: ") and "Traceback" not in result.stderr
    for part in parts:
        assert part in result.stderr
    assert not (folder / "run").exists()


def test_the_plan_of_the_environment_is_for_as_many_processes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLAIT_PLAN", "data=3")
    result = CliRunner().invoke(app, ["run", "text.txt", "--processes", "2"])
    assert result.exit_code == 2 and "'data=3' is for 3 processes, not 2" in result.stderr


def test_version() -> None:
    assert CliRunner().invoke(app, ["--version"]).stdout.startswith("plait 0.")


def test_only_one_rank_speaks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLAIT_FAILURE_FILE", str(tmp_path / "failure"))
    assert first_to_fail() and not first_to_fail()
    monkeypatch.delenv("PLAIT_FAILURE_FILE")
    assert first_to_fail()


@pytest.mark.usefixtures("_forked_ranks")
def test_run_shows_the_first_exception_once(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (folder / "script.py").write_text(
        "import os, sys, time\n"
        "print('arguments', sys.argv[1:], os.environ['PLAIT_PLAN'], flush=True)\n"
        "if os.environ['RANK'] == '1':\n    raise ValueError('boom')\n"
        "time.sleep(60)\n"
    )
    start = time.monotonic()
    launcher = CliRunner().invoke(app, ["run", "script.py", "--plan", "data=2", "--lr", "3"])
    out, error = capfd.readouterr()
    assert launcher.exit_code == 1 and time.monotonic() - start < 40
    assert "arguments ['--lr', '3'] data=2" in out
    assert error.count("ValueError: boom") == 2 and error.count("Traceback") == 1
    assert error.rstrip().endswith("plait: rank 1 failed: ValueError: boom")
    assert "runpy" not in error and "elastic" not in error


def trains_by(plan: str) -> str:
    """A script that trains under a plan of its own."""
    return (
        "import functools, torch, plait\n"
        "sgd = functools.partial(torch.optim.SGD, lr=0.1)\n"
        f"trainer = plait.Trainer(torch.nn.Linear(4, 4), lambda model, x: model(x).square().mean(), sgd, {plan!r})\n"
        "trainer.step(torch.ones(8, 4))\n"
        "print('trained by', trainer.plan)\n"
    )


def test_run_leaves_a_script_its_own_plan(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "script.py").write_text(trains_by("micro=2"))
    for name in ("argv", "path"):  # which the script gets as under plain Python
        monkeypatch.setattr(sys, name, [*getattr(sys, name)])
    alone = CliRunner().invoke(app, ["run", "script.py", "--processes", "1"])
    assert alone.stdout == "trained by micro=2\n", alone.output


@pytest.mark.usefixtures("_forked_ranks")
def test_run_leaves_a_script_its_own_plan_on_two_processes(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (folder / "script.py").write_text(trains_by("data=2 sync=2"))
    CliRunner().invoke(app, ["run", "script.py", "--processes", "2"])
    out, error = capfd.readouterr()
    assert out.count("trained by data=2 sync=2") == 2, error


@pytest.mark.usefixtures("_forked_ranks")
def test_run_traces_a_script_as_it_is(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (folder / "script.py").write_text(
        "import functools, torch, plait\n"
        "from torch.nn.functional import mse_loss\n"
        "sgd = functools.partial(torch.optim.SGD, lr=0.1)\n"
        "loss_fn = lambda model, batch: mse_loss(model(batch), batch)\n"
        "trainer = plait.Trainer(torch.nn.Linear(4, 4), loss_fn, sgd)\n"
        "for _ in range(3):\n    trainer.step(torch.ones(4, 4))\n"
    )
    CliRunner().invoke(app, ["run", "script.py", "--plan", "data=2", "--trace", "traced"])
    error = capfd.readouterr().err
    assert not error, error
    page = CliRunner().invoke(app, ["report", "traced"])
    assert "report.html" in page.stdout and (folder / "traced" / "report.html").stat().st_size > 1 << 20, page.output


@pytest.mark.usefixtures("_forked_ranks")
def test_train_on_two_processes_stop_and_resume_under_another_plan(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    metrics = folder / "run" / "metrics.jsonl"
    begun, over = threading.Event(), threading.Event()

    def stop() -> None:
        while not over.wait(0.05) and not begun.is_set():
            if metrics.exists() and metrics.stat().st_size:
                begun.set()
                os.kill(os.getpid(), signal.SIGTERM)

    stopper = threading.Thread(target=stop)
    stopper.start()
    launcher = CliRunner().invoke(app, ["train", "job.toml", "--plan", "data=2", "--set", "train.steps=100000"])
    over.set()
    stopper.join()
    out, error = capfd.readouterr()
    assert launcher.exit_code == 128 + signal.SIGTERM, launcher.output + error
    assert "--resume goes on from there" in out and error == "" and launcher.output == ""
    done = len(read_metrics(metrics))
    steps = f"train.steps={done + 5}"
    launcher = CliRunner().invoke(app, ["train", "job.toml", "--plan", "tensor=2", "--set", steps, "--resume"])
    out, error = capfd.readouterr()
    assert launcher.exit_code == 0, launcher.output + error
    assert f"going on after step {done}" in out and (folder / "run" / "sample.txt").exists()
    alone = CliRunner().invoke(app, ["train", "job.toml", "--set", steps, "--set", "train.out=one"])
    assert alone.exit_code == 0, alone.output
    losses, wanted = (read_losses(folder / out) for out in ("run", "one"))
    assert losses[:20] == pytest.approx(wanted[:20], rel=1e-5)  # rounding grows with the steps
    assert losses == pytest.approx(wanted, rel=1e-2)


def read_losses(out: Path) -> list[float]:
    return [line["loss"] for line in read_metrics(out / "metrics.jsonl")]


def test_verify_and_explain(folder: Path) -> None:
    result = CliRunner().invoke(app, ["verify", "job.toml", "--plan", "data=2 tensor=2"])
    assert result.exit_code == 0, result.output
    assert "data=2 tensor=2" in result.stdout
    result = CliRunner().invoke(app, ["explain", "job.toml", "--plan", "data=2 tensor=2"])
    assert result.exit_code == 0 and "blocks.0.query.weight" in result.stdout
    result = CliRunner().invoke(app, ["explain", "job.toml", "--plan", "tensor=2", "--tensor", "blocks.0.query.weight"])
    assert result.exit_code == 0 and "16@tensor" in result.stdout
    assert not (folder / "run").exists()


def test_explain_of_workers_names_them_and_the_servers(folder: Path) -> None:
    result = CliRunner().invoke(app, ["explain", "job.toml", "--plan", "workers=2 servers=1"])
    assert result.exit_code == 0, result.output
    assert result.output.startswith("plan workers=2 servers=1: 2 workers, each on its part of the batch, and 1 server ")
    assert "What follows is the step of one worker.\n\neach of them: plan one device\n" in result.output
    result = CliRunner().invoke(app, ["explain", "job.toml", "--plan", "data=2 zero=3", "--tensor", "head.weight"])
    assert "read by   head\n" in result.output, result.output


def test_resume_may_stand_alone_or_be_auto(folder: Path) -> None:
    for steps, words in (("1", ["--resume=auto"]), ("2", ["--resume"]), ("3", ["--resume", "auto"])):
        result = CliRunner().invoke(app, ["train", "--set", f"train.steps={steps}", *words, "job.toml"])
        assert result.exit_code == 0, result.output
        assert ("going on after step" in result.output) is (steps != "1")
    result = CliRunner().invoke(app, ["checkpoint", "convert", "run", "out"])
    assert "out/model.safetensors\nno config.json: the checkpoint has no configuration" in result.output


def test_runs_as_a_module_as_torchrun_starts_it() -> None:
    done = subprocess.run([sys.executable, "-m", "plait", "--help"], capture_output=True, text=True, check=True)
    assert "train" in done.stdout and "explain" in done.stdout


def test_memory_says_whether_it_fits_and_what_would(folder: Path) -> None:
    page = CliRunner().invoke(app, ["memory", "job.toml", "--plan", "data=2", "--limit", "1GiB"])
    assert page.exit_code == 0, page.output
    assert "plan data=2, " in page.stdout and "at the peak" in page.stdout and "fits: " in page.stdout
    short = CliRunner().invoke(app, ["memory", "job.toml", "--plan", "data=2", "--limit", "325KiB"])
    assert short.exit_code == 1, short.output
    assert "does not fit: " in short.stdout and "with zero=1 it would: " in short.stdout
    never = CliRunner().invoke(app, ["memory", "job.toml", "--plan", "data=2", "--limit", "1KiB"])
    assert never.exit_code == 1 and "no single change of the plan would do" in never.stdout
    assert not (folder / "run").exists()


def test_a_run_below_a_file_is_refused_before_it_starts(folder: Path) -> None:
    (folder / "file").write_text("")
    result = CliRunner().invoke(app, ["train", "job.toml", "--set", "train.out=file/run"])
    assert result.exit_code == 2 and "lies below file, which is a file; name a folder" in result.output


@pytest.mark.parametrize("processes", ["1", "2"])
def test_ctrl_c_before_training_begins_is_one_line(
    folder: Path, processes: str, capfd: pytest.CaptureFixture[str]
) -> None:
    (folder / "slow.py").write_text(
        "import os, pathlib, time\n"
        "import torch\n"
        "def make():\n"
        f"    if 'RANK' in os.environ or {processes} == 1:\n"  # else it is what starts the ranks, which looks first
        "        pathlib.Path('built.' + os.environ.get('RANK', '0')).touch()\n"
        "        time.sleep(60)\n"
        "    return [{'x': torch.zeros(16, dtype=torch.long), 'y': torch.zeros(16, dtype=torch.long)}] * 40\n"
    )
    (folder / "job.toml").write_text(SMALL.replace("text.txt", "slow:make"))
    command = [sys.executable, "-m", "plait", "train", "job.toml", "--processes", processes]
    process = ForkedPlait(command, {**os.environ}, start_new_session=True)
    assert process.pid is not None
    built = [folder / f"built.{rank}" for rank in range(int(processes))]
    while process.poll() is None and not all(file.exists() for file in built):
        time.sleep(0.05)
    assert process.poll() is None, capfd.readouterr()
    os.killpg(process.pid, signal.SIGINT)
    process.wait()
    out, error = capfd.readouterr()
    assert (process.returncode, error) == (128 + signal.SIGINT, "plait: stopped by Ctrl-C\n"), out


PRINTS = """
import os, pathlib, time
pathlib.Path('up.' + os.environ['RANK']).touch()
while not (pathlib.Path('up.0').exists() and pathlib.Path('up.1').exists()):  # so that they print side by side
    time.sleep(0.01)
for i in range(4000):
    print('rank', os.environ['RANK'], 'says', i, '.' * (i % 97))
"""
PRINTED = sorted(f"rank {rank} says {i} {'.' * (i % 97)}" for rank in range(2) for i in range(4000))


@pytest.mark.usefixtures("_forked_ranks")
def test_what_ranks_print_stays_in_whole_lines(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (folder / "script.py").write_text(PRINTS)
    result = CliRunner().invoke(app, ["run", "script.py", "--processes", "2"])
    out, error = capfd.readouterr()
    assert result.exit_code == 0, error
    assert sorted(out.splitlines()) == PRINTED


def test_what_unbuffered_ranks_print_stays_in_whole_lines(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONUNBUFFERED", "1")
    (folder / "script.py").write_text(PRINTS)
    process = plait("run", "script.py", "--processes", "2")
    out, error = process.communicate()
    assert process.returncode == 0, error
    assert sorted(out.splitlines()) == PRINTED
