"""What the device that is not there shows of one that is: tests/host_gpu.py."""

from __future__ import annotations

import host_gpu
import pytest
import torch

pytestmark = pytest.mark.skipif(not host_gpu.is_here(), reason="this is a GPU")


@pytest.fixture
def mine() -> torch.Tensor:
    return torch.ones(4, device="cuda")


def test_tensors_of_two_devices_do_not_mix(mine: torch.Tensor) -> None:
    for other in (torch.ones(4), torch.ones(4, device="cuda:1")):
        with pytest.raises(RuntimeError, match="expected all tensors to be on the same device|Expected all tensors"):
            torch.bmm(mine.view(1, 2, 2), other.view(1, 2, 2))
    assert (mine + torch.tensor(2.0)).device == mine.device, "but for a number on the host"


def test_waits_of_the_host_are_counted_with_their_line(mine: torch.Tensor) -> None:
    for wait in (
        lambda: mine.sum().item(), lambda: mine.cpu(), lambda: mine[mine > 0],
        lambda: torch.tensor([1.0], device="cuda"), lambda: mine.copy_(torch.ones(4)), torch.cuda.synchronize,
    ):  # fmt: skip
        with host_gpu.waits_here() as waits:
            wait()
        assert waits and waits[0].behind == 0 and "test_host_gpu.py" in waits[0].place
    with host_gpu.waits_here() as waits:
        mine.copy_(torch.ones(4), non_blocking=True)
        torch.zeros(4, device="cuda").add_(1).mul_(mine).sum()
    assert waits == []


def test_a_copy_to_the_host_is_there_once_the_host_has_waited(mine: torch.Tensor) -> None:
    host = torch.empty(4, pin_memory=True).copy_(mine, non_blocking=True)
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream())
    assert bool(host.isnan().all())
    event.synchronize()
    assert host.tolist() == [1.0] * 4


def test_memory_that_is_used_by_two_streams_or_changed_during_a_copy_is_told_of(mine: torch.Tensor) -> None:
    side, host = torch.cuda.Stream(), torch.ones(4, pin_memory=True)
    with torch.cuda.stream(side):
        mine.mul_(2)
    assert "reads what another stream writes" in host_gpu.races.pop()
    with torch.cuda.stream(side):
        side.wait_stream(torch.cuda.default_stream())
        theirs = torch.ones(4, device="cuda")
    assert host_gpu.races == []
    theirs.sum()
    assert "reads what another stream writes" in host_gpu.races.pop()
    torch.cuda.current_stream().wait_stream(side)
    theirs.sum()
    assert host_gpu.races == []
    del theirs
    mine.copy_(host, non_blocking=True)
    assert "memory is free for its stream" in host_gpu.races.pop()
    host.zero_()
    torch.cuda.synchronize()
    assert "the host changed memory" in host_gpu.races.pop() and host_gpu.races == []


def test_memory_is_counted_and_ends() -> None:
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    kept = torch.empty(1000, device="cuda")
    assert torch.cuda.memory_allocated() == before + 4000
    del kept
    assert (torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()) == (before, before + 4000)
    host_gpu.set_limit(before + 1000)
    try:
        with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
            torch.empty(1000, device="cuda")
    finally:
        host_gpu.set_limit(0)
