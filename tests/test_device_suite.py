"""The device suite (tests/device) and the script that runs it, on a GPU in the host's memory: tests/host_gpu.py."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.xdist_group("devices")
@pytest.mark.timeout(600)
@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++ to build tests/host_gpu.cpp with")
def test_the_device_suite_passes_and_the_script_for_gpus_works(tmp_path: Path) -> None:
    env = os.environ | {"PYTHON": sys.executable}
    env.pop("PYTEST_XDIST_WORKER", None)
    command = [str(ROOT / "scripts" / "gpu"), "--short", str(tmp_path)]
    run = subprocess.run(command, env=env, capture_output=True, text=True, timeout=590, check=False)
    assert run.returncode == 0, run.stdout[-20000:] + run.stderr[-2000:]
    assert "## Llama tiny" in run.stdout and "| plait | 1 |" in run.stdout and "Error" not in run.stdout
    assert not (ROOT / ".venv-gpu").exists(), "nothing was missing"
