"""The lane between a device and memory of its host. On an accelerator it is a stream of its own, beside the one that
computes, and host memory is pinned; on CPU both are the same memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from plait.comm.device import CopyStream, Event, is_host, keep_for_current_stream, pinned_like


class HostCopies:
    """Of one device. All calls are made by the thread that computes, but for those that say otherwise."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.is_host = is_host(device)
        self.stream = None if self.is_host else CopyStream(device)

    def host_like(self, tensor: Tensor) -> Tensor:
        """New host memory for a tensor of this form."""
        return pinned_like(tensor, self.device)

    def down(self, tensor: Tensor, into: Tensor) -> Callable[[], None]:
        """Begin to copy a tensor of the device into host memory; what is returned ends that, in any thread."""
        if self.stream is None:
            return lambda: _copy(into, tensor)
        with self.stream.entered(after=Event(self.device)):
            into.copy_(tensor, non_blocking=True)
            keep_for_current_stream(tensor)
            return Event(self.device).synchronize

    def up(self, form: Tensor) -> ArrivingTensor:
        """Make ready for a tensor of this form that will come to the device."""
        return ArrivingTensor(self, form)


class ArrivingTensor:
    """A tensor that comes to the device from host memory."""

    def __init__(self, lane: HostCopies, form: Tensor) -> None:
        self._lane = lane
        self._tensor: Tensor | None = None
        if not lane.is_host:
            self._tensor = torch.empty_like(form, device=lane.device)
            self._ready = Event(lane.device)  # its memory was somebody's before

    def land(self, host: Tensor) -> None:
        """Begin to copy; in any thread. On CPU the host memory becomes the tensor."""
        if self._lane.stream is None:
            self._tensor = host
            return
        assert self._tensor is not None
        with self._lane.stream.entered(after=self._ready):
            self._tensor.copy_(host, non_blocking=True)
            self._done = Event(self._lane.device)

    def take(self) -> Tensor:
        """The tensor, which what is computed from now on may read. After `land`."""
        assert self._tensor is not None
        if not self._lane.is_host:
            self._done.precede(self._lane.device)
        tensor, self._tensor = self._tensor, None
        return tensor


def _copy(into: Tensor, tensor: Tensor) -> None:
    """On one core, beside those that compute: torch would take them all."""
    if into.stride() == tensor.stride() and into.dtype == tensor.dtype and tensor.numel():
        _flat(into)[:] = _flat(tensor)
    else:
        into.copy_(tensor)


def _flat(tensor: Tensor) -> Any:
    """The bytes of a dense tensor, as numpy has them."""
    return torch.as_strided(tensor.detach(), (tensor.numel(),), (1,)).view(torch.uint8).numpy()
