"""Asynchronous copies between a device and its host's memory.

On an accelerator they run in a stream of their own, beside the one that computes, and host memory is pinned. On a CPU
both are the same memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from plait.comm.device import CopyStream, Event, is_host, keep_for_current_stream, pinned_like


class HostCopies:
    """The copies of one device. The thread that computes makes all calls, except where a method says otherwise."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.is_host = is_host(device)
        self.stream = None if self.is_host else CopyStream(device)

    def host_like(self, tensor: Tensor) -> Tensor:
        """New host memory of the tensor's shape, dtype and strides."""
        return pinned_like(tensor, self.device)

    def down(self, tensor: Tensor, into: Tensor) -> Callable[[], None]:
        """Start to copy a tensor of the device into host memory. Returns a function that waits, in any thread."""
        if self.stream is None:
            return lambda: _copy(into, tensor)
        with self.stream.entered(after=Event(self.device)):
            into.copy_(tensor, non_blocking=True)
            keep_for_current_stream(tensor)
            return Event(self.device).synchronize


class ArrivingTensor:
    """A tensor of the form's shape, dtype and strides that is copied from host memory to the device."""

    def __init__(self, copies: HostCopies, form: Tensor) -> None:
        self._copies = copies
        self._tensor: Tensor | None = None
        if not copies.is_host:
            self._tensor = torch.empty_like(form, device=copies.device)
            self._ready = Event(copies.device)  # the memory may have had another reader before

    def land(self, host: Tensor) -> None:
        """Start the copy, in any thread. On a CPU the host memory becomes the tensor."""
        if self._copies.stream is None:
            self._tensor = host
            return
        assert self._tensor is not None
        with self._copies.stream.entered(after=self._ready):
            self._tensor.copy_(host, non_blocking=True)
            self._done = Event(self._copies.device)

    def take(self) -> Tensor:
        """The tensor, for computations that are launched from now on. Called once, after `land`."""
        assert self._tensor is not None
        if not self._copies.is_host:
            self._done.precede(self._copies.device)
        tensor, self._tensor = self._tensor, None
        return tensor


def _copy(into: Tensor, tensor: Tensor) -> None:
    """Copy on one core, beside those that compute; torch would use all of them."""
    if into.stride() == tensor.stride() and into.dtype == tensor.dtype and tensor.numel():
        _flat(into)[:] = _flat(tensor)
    else:
        into.copy_(tensor)


def _flat(tensor: Tensor) -> Any:
    """The bytes of a dense tensor, as a numpy array."""
    return torch.as_strided(tensor.detach(), (tensor.numel(),), (1,)).view(torch.uint8).numpy()
