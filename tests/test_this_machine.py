"""This machine as a cluster: measured once, stale measurements, and `plait train --plan auto`."""

from __future__ import annotations

import os
import re
import socket
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from comm_worlds import ForkedPlait
from test_planner import SMALL
from typer.testing import CliRunner

import plait
from plait.api.cli import app
from plait.api.cluster_measurement import describe_here
from plait.api.job import this_machine as here
from plait.api.job.this_machine import stale, this_machine
from plait.api.memory import Estimator
from plait.comm import launch
from plait.errors import ConfigError


@pytest.fixture
def job(tmp_path: Path) -> Path:
    path = tmp_path / "job.toml"
    path.write_text(SMALL.format(out=tmp_path / "run"))
    return path


def _measured(folder: Path, host: str, num: int = 2) -> Path:
    """A measurement of this machine, by its name and cores, with round numbers."""
    name, cores = describe_here()
    text = (Path(plait.__file__).parent / "spec" / "clusters" / "xeon-2core.toml").read_text()
    text = re.sub(r'measured = ".*"', f'measured = "2026-01-01 on {host}"', text)
    text = re.sub(r'(?m)^name = ".*"', f'name = "{name}"', text)
    text = re.sub(r"(?m)^cores = .*", f"cores = {cores}", text)
    path = folder / "plait" / "clusters" / f"{socket.gethostname()}-{num}.toml"
    path.parent.mkdir(parents=True)
    text = re.sub(r"(?m)^devices = .*", f"devices = {num}\n", text)
    path.write_text(
        text.replace("[device]\n", "[device]\nstep_seconds = 1e-3\nupdate_seconds = 1e-5\n")
        if "step_seconds" not in text
        else text
    )
    return path


def test_a_measurement_of_other_hardware_is_stale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = _measured(tmp_path, socket.gethostname())
    found = this_machine(2)
    assert stale(found, 2) == ""
    assert "it is of 2 devices, and there are 4" in stale(found, 4)
    assert "2 cores" in stale(replace(found, host=replace(found.host, cores=2)), 2) or os.cpu_count() == 2
    other = replace(found, device=replace(found.device, name="another"))
    assert "it is of another" in stale(other, 2)
    former = replace(found, device=replace(found.device, update_seconds=0.0))
    assert "it does not have update_seconds, which a former version" in stale(former, 2)
    path.write_text(path.read_text().replace(f"on {socket.gethostname()}", "on elsewhere"))
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="is not measured, and a rank cannot do it; run `plait cluster measure"):
        this_machine(2)


def test_a_measurement_that_cannot_be_read_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = _measured(tmp_path, socket.gethostname())
    good = path.read_text()
    path.write_text("[device\n")
    monkeypatch.setattr(here, "_measure", lambda num, file: file.write_text(good))
    assert this_machine(2).num_devices == 2
    assert f"the measurement {path} is stale: {path} is not valid TOML" in capsys.readouterr().err


@pytest.mark.parametrize(
    "command",
    [
        ["plan", "nowhere.toml"],
        ["plan", "job.toml", "--memory", "70"],
        ["plan", "job.toml", "--limit-keys", "tensr=2"],
        ["plan", "job.toml", "--goal", "speed"],
        ["plan", "job.toml", "--set", "train.steps=none"],
        ["train", "nowhere.toml", "--plan", "auto"],
        ["train", "job.toml", "--plan", "auto tensr=2"],
        ["simulate", "job.toml", "--html", "nowhere/page.html"],
        ["simulate", "job.toml", "--plan", "data=2", "--cluster", "cpux1"],
    ],
)
def test_what_cannot_be_is_said_before_this_machine_is_measured(
    command: list[str], job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(job.parent)
    monkeypatch.setenv("XDG_CACHE_HOME", str(job.parent))
    for module, name in ((here, "_measure"), (Estimator, "program")):
        monkeypatch.setattr(module, name, lambda *_: pytest.fail("the machine was measured, or the step captured"))
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 2, result.output


def test_training_under_the_plan_that_is_found(job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _measured(tmp_path, socket.gethostname())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(launch, "subprocess", SimpleNamespace(Popen=ForkedPlait))
    command = ["train", str(job), "--processes", "2", "--plan"]
    words = "auto data=2 zero=0..1 micro=1 recompute=none tensor=1 pipeline=1 context=1"
    result = CliRunner().invoke(app, [*command, words])
    assert result.exit_code == 0, result.output
    line = next(line for line in result.stderr.splitlines() if line.startswith("plait: plan "))
    assert "s a step predicted" in line
    assert "sync" not in line
    assert "bf16" not in line
    assert (tmp_path / "run" / "metrics.jsonl").exists()
    bad = CliRunner().invoke(app, [*command, "auto tensr=2"])
    assert bad.exit_code == 2
    assert "'tensr' is not searched" in bad.stderr


def test_without_a_folder_to_keep_it_in_a_measurement_is_of_one_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = _measured(tmp_path, socket.gethostname()).read_text()
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file" / "cache"))
    paths = []

    def measure(num: int, path: Path) -> None:
        paths.append(path)
        path.write_text(text)

    monkeypatch.setattr(here, "_measure", measure)
    assert this_machine(2).num_devices == 2 and not paths[0].exists()
    assert "cannot be made: Not a directory; set XDG_CACHE_HOME" in capsys.readouterr().err
