"""One thread, fixed seeds and no network for every test."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
# Of the processes that tests start:
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["PYTHONPATH"] = f"{Path(__file__).with_name('started')}:{os.environ.get('PYTHONPATH', '')}".rstrip(":")

import hypothesis
import pytest
import torch

torch.set_num_threads(1)

# Deadlines are timing asserts, which two shared cores cannot keep; derandomised, so that a failure comes back.
hypothesis.settings.register_profile("plait", deadline=None, derandomize=True, max_examples=50)
hypothesis.settings.load_profile("plait")


def pytest_collection_finish() -> None:
    """Have the garbage collector pass by what was imported, and come less often: it took 7% of the time."""
    gc.freeze()
    gc.set_threshold(10_000, 10, 20)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Iterator[None]:
    """Look for cycles between tests: what a test has captured is alive until its end, and was looked through thrice."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_sessionfinish() -> None:
    """Look once for what was left, and not twice as pytest does: what is there is frozen."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _same_draws() -> None:
    torch.manual_seed(0)
