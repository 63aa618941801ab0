"""Steps on a CUDA device that is not there: where tensors are, and that the host never waits for it.

A process of its own, tests/device_ranks.py, runs the cases. What it shows of a GPU is in tests/fake_cuda.py.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fake_cuda import LIBRARY, build

RANKS = Path(__file__).with_name("device_ranks.py")
PLANS = (
    "data=1", "data=2", "data=2 zero=1 micro=2", "data=2 zero=2 micro=2", "data=2 zero=3", "tensor=2",
    "data=2 recompute=layer", "data=2 precision=bf16", "pipeline=2 micro=4 schedule=1f1b",
    "pipeline=2 data=2 zero=3 micro=4 schedule=interleaved", "pipeline=2 tensor=2 micro=2 schedule=zb-h1",
    "not captured",
)  # fmt: skip
ON_HOST = ("home.optimizer=host", "home.parameters=host home.optimizer=host")

pytestmark = [
    pytest.mark.xdist_group("devices"),
    pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++ to build tests/fake_cuda.cpp with"),
]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What each case found, by name."""
    library = build(tmp_path_factory.mktemp("device"))
    env = os.environ | {LIBRARY: str(library)}
    run = subprocess.run([sys.executable, RANKS], env=env, capture_output=True, text=True, timeout=250, check=False)
    assert run.returncode == 0, run.stderr
    return {line["case"]: line for line in map(json.loads, run.stdout.splitlines())}


@pytest.mark.parametrize("case", PLANS)
def test_a_step_is_on_the_device_and_the_host_does_not_wait(case: str, found: dict[str, dict[str, Any]]) -> None:
    assert "error" not in found[case], found[case]["trace"]
    assert (found[case]["devices"], found[case]["loss"], found[case]["aux"]) == (["cuda"], "cuda", "cuda")


@pytest.mark.parametrize("case", ON_HOST)
def test_what_has_its_home_on_the_host_is_there(case: str, found: dict[str, dict[str, Any]]) -> None:
    assert "error" not in found[case], found[case]["trace"]
    assert (found[case]["devices"], found[case]["loss"]) == (["cpu", "cuda"], "cuda")


def test_the_device_shows_what_it_is_for(found: dict[str, dict[str, Any]]) -> None:
    assert "_local_scalar_dense" in found["a wait for the device"]["error"]
    assert "two devices, cuda:0 and cpu" in found["two devices"]["error"]
