"""The device suite (tests/device) on a GPU in the host's memory (tests/host_gpu.py), and the script for real ones."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from device_library import why_not
from host_gpu import LIBRARY, build

ROOT = Path(__file__).parent.parent


@pytest.mark.xdist_group("devices")
@pytest.mark.timeout(600)
@pytest.mark.skipif(bool(why_not()), reason=why_not())
def test_the_device_suite_passes_on_a_gpu_in_the_memory_of_the_host(tmp_path: Path) -> None:
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = os.environ | {LIBRARY: str(build(tmp_path)), "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    env.pop("PYTEST_XDIST_WORKER", None)
    command = [sys.executable, "-m", "pytest", "-p", "host_gpu", "-p", "no:cacheprovider", "-q", "tests/device"]
    run = subprocess.run(
        [*command, f"--basetemp={tmp_path / 'suite'}"],
        env=env, cwd=ROOT, capture_output=True, text=True, timeout=590, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout[-20000:] + run.stderr[-2000:]


def test_the_script_for_gpus_says_why_it_runs_nothing_here() -> None:
    if torch.cuda.is_available():
        pytest.skip("here are GPUs")
    env = os.environ | {"PYTHON": sys.executable}
    run = subprocess.run([ROOT / "scripts" / "gpu"], env=env, capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith("skipped: torch") and "sees no GPU" in run.stdout
