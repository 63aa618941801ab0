"""scripts/gpu: on a GPU in the host's memory (tests/host_gpu.py) with --short, and where there is none."""

from __future__ import annotations

import os
import re
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
def test_the_script_for_gpus_runs_the_device_suite_and_its_benchmark_on_one_in_the_memory_of_the_host(
    tmp_path: Path,
) -> None:
    env = os.environ | {LIBRARY: str(build(tmp_path)), "PYTHON": sys.executable}
    env.pop("PYTEST_XDIST_WORKER", None)
    run = subprocess.run(
        [ROOT / "scripts" / "gpu", "--short", tmp_path], env=env, capture_output=True, text=True, timeout=590,
        check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout[-20000:] + run.stderr[-2000:]
    rows = re.findall(r"^\| (PyTorch|plait) \| 1 \| \d+ ", run.stdout, re.M)
    assert rows == ["PyTorch", "plait"], f"a row of bench.device has no numbers: {run.stdout[-2000:]}"


def test_the_script_for_gpus_says_why_it_runs_nothing_here() -> None:
    if torch.cuda.is_available():
        pytest.skip("here are GPUs")
    env = os.environ | {"PYTHON": sys.executable}
    run = subprocess.run([ROOT / "scripts" / "gpu"], env=env, capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith("skipped: torch") and "sees no GPU" in run.stdout
