"""What a rank asks of its device beside tensors: streams, events, pinned memory, random state.

No other file names an accelerator's library. A CPU has one stream of work, and a call has done its work when it
returns: there an event is over as it is made, and nothing is pinned.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from plait.errors import WorldError

_ACCELERATOR = "cuda"


def is_host(device: torch.device) -> bool:
    """Whether tensors of the device lie in the host's own memory."""
    return device.type == "cpu"


def default_kind() -> str:
    """The type of device that ranks which are processes compute on."""
    return _ACCELERATOR if torch.cuda.is_available() else "cpu"


def own_device(kind: str | None = None) -> torch.device:
    """The device of this process, by its number among those of this host.

    WorldError if the host has fewer accelerators than processes.
    """
    kind = kind or default_kind()
    if kind != _ACCELERATOR:
        return torch.device(kind)
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if local >= torch.cuda.device_count():
        raise WorldError(
            f"local rank {local} has no GPU: this host has {torch.cuda.device_count()}; start fewer processes here, or"
            " compute on CPU"
        )
    return torch.device(kind, local)


def make_current(device: torch.device) -> None:
    """Let this thread's work go to the device."""
    if device.type == _ACCELERATOR:
        torch.cuda.set_device(device)


def process_group_backend(device: torch.device) -> str:
    """What torch.distributed is to use among ranks on such devices."""
    return "gloo" if is_host(device) else f"cpu:gloo,{device.type}:nccl"


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all that it was given."""
    if not is_host(device):
        torch.cuda.synchronize(device)


def bytes_allocated(device: torch.device) -> int:
    """Bytes of an accelerator's memory that tensors of this process take."""
    return torch.cuda.memory_allocated(device)


def pinned_like(tensor: Tensor, device: torch.device) -> Tensor:
    """New host memory for a tensor of this form, from and to which the device copies while the host does other work."""
    return torch.empty_like(tensor, device="cpu", pin_memory=not is_host(device), requires_grad=False)


def random_devices(*devices: torch.device) -> list[torch.device]:
    """Those of the devices whose random state is not the host's, for `torch.random.fork_rng`."""
    return sorted({device for device in devices if device.type == _ACCELERATOR}, key=str)


def random_state(device: torch.device) -> Tensor | None:
    """The random state of an accelerator; None of a CPU, which has the host's."""
    return torch.cuda.get_rng_state(device) if device.type == _ACCELERATOR else None


def set_random_state(device: torch.device, state: Tensor) -> None:
    if device.type == _ACCELERATOR:
        torch.cuda.set_rng_state(state, device)


class Event:
    """A point in the work that the current stream of a device has been given: after all that it has got so far."""

    __slots__ = ("_event",)

    def __init__(self, device: torch.device, timing: bool = False) -> None:
        self._event: Any = None
        if not is_host(device):
            self._event = torch.cuda.Event(enable_timing=timing)
            self._event.record(torch.cuda.current_stream(device))

    def synchronize(self) -> None:
        """Wait until the device is there; in any thread."""
        if self._event is not None:
            self._event.synchronize()

    def precede(self, device: torch.device) -> None:
        """Let what the current stream of the device is given from now on begin after this."""
        if self._event is not None:
            torch.cuda.current_stream(device).wait_event(self._event)

    def seconds_until(self, later: Event) -> float:
        """The device's time between two events with timing, both of them over."""
        return float(self._event.elapsed_time(later._event)) / 1e3


class CopyStream:
    """A stream of an accelerator for copies, beside the one that computes."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._device = device

    @contextmanager
    def entered(self, after: Event | None = None) -> Iterator[None]:
        """Within it this thread's work goes to the stream; it begins after `after`."""
        with torch.cuda.stream(self._stream):
            if after is not None:
                after.precede(self._device)
            yield


def keep_for_current_stream(tensor: Tensor) -> None:
    """Do not give the tensor's memory to others while the current stream still reads it."""
    if not is_host(tensor.device):
        tensor.record_stream(torch.cuda.current_stream(tensor.device))
