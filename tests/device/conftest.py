"""The device suite: what a GPU shows that a CPU does not. tests/test_devices.py runs it on one that is not there."""

from __future__ import annotations

from collections.abc import Iterator

import host_gpu
import pytest
import torch

collect_ignore_glob = [] if torch.cuda.is_available() else ["test_*.py"]


@pytest.fixture(autouse=True)
def _no_races() -> Iterator[None]:
    """No test leaves memory to two streams at once, as far as the device can tell."""
    host_gpu.races.clear()
    yield
    found, host_gpu.races[:] = list(host_gpu.races), []
    assert not found
