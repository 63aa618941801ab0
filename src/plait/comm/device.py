"""A rank's device: streams, events, pinned memory, random state.

No other file names an accelerator's library. A CPU has one stream, and its work is done when a call returns: there an
event is complete when it is created, and no memory is pinned.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from plait.cost.memory_model import PAGE, padded
from plait.errors import WorldError

_ACCELERATOR = "cuda"


def is_host(device: torch.device) -> bool:
    """Whether tensors of the device are in the host's memory."""
    return device.type == "cpu"


def use_fake_tensors_first() -> None:
    """Use fake tensors in this thread, before the threads that it starts do.

    Where torch has CUDA but there is no GPU, torch 2.11 keeps a device guard of the first thread that uses them, and
    reads it when that thread has ended (a segmentation fault).
    """
    from torch._subclasses.fake_tensor import FakeTensorMode  # not imported by what only communicates

    with FakeTensorMode():
        pass


def default_kind() -> str:
    """The device type that processes compute on by default."""
    return _ACCELERATOR if torch.cuda.is_available() else "cpu"


def device_name(kind: str) -> str:
    """The name that the driver gives the current device of a type; empty for a CPU, and where no driver answers."""
    return torch.cuda.get_device_name() if kind == _ACCELERATOR and torch.cuda.is_available() else ""


def num_accelerators() -> int:
    """The accelerators of this host."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def memory_of(device: torch.device) -> int:
    """Bytes of a device's memory; of a CPU those of its host."""
    if is_host(device):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return int(torch.cuda.get_device_properties(device).total_memory)


def without_bf16(device: torch.device) -> str:
    """The device in words, if it is a GPU that computes bfloat16 by other means than its own units, else ""."""
    if device.type != _ACCELERATOR or torch.version.hip is not None:
        return ""
    major, minor = torch.cuda.get_device_capability(device)
    return "" if major >= 8 else f"the {torch.cuda.get_device_name(device)} of compute capability {major}.{minor}"


def own_device(kind: str | None = None) -> torch.device:
    """The device of this process, chosen by LOCAL_RANK among those of the host.

    Raises WorldError if the host has fewer accelerators than processes.
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
    """Make the device current for this thread."""
    if device.type == _ACCELERATOR:
        torch.cuda.set_device(device)
        torch.cuda.init()  # or DeviceMesh would choose a device itself


def process_group_backend(device: torch.device) -> str:
    """The backend of torch.distributed for ranks on such devices."""
    return "gloo" if is_host(device) else f"cpu:gloo,{device.type}:nccl"


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished all its work."""
    if not is_host(device):
        torch.cuda.synchronize(device)


def bytes_allocated(device: torch.device) -> int:
    """Bytes of an accelerator's memory that tensors of this process occupy."""
    return torch.cuda.memory_allocated(device)


def memory_taken(device: torch.device) -> int:
    """Bytes of a device's memory that tensors of this process occupy; of a CPU those that the process has in memory."""
    if not is_host(device):
        return bytes_allocated(device)
    with open("/proc/self/statm", encoding="utf-8") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def memory_ran_out(error: BaseException) -> bool:
    """Whether an error of torch or of a driver says that there is no memory left."""
    text = str(error).lower()
    said = ("out of memory", "can't allocate memory", "not enough memory")
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or any(words in text for words in said)


def pinned_like(tensor: Tensor, device: torch.device) -> Tensor:
    """Uninitialized host memory in the shape and dtype of a tensor, pinned for asynchronous copies with the device."""
    return torch.empty_like(tensor, device="cpu", pin_memory=not is_host(device), requires_grad=False)


def pinned(tensor: Tensor) -> Tensor:
    """A tensor in host memory as pinned memory: itself, or a copy."""
    return tensor if tensor.is_pinned() else tensor.pin_memory()


def random_devices(*devices: torch.device) -> list[torch.device]:
    """The devices with a random state of their own, for `torch.random.fork_rng`."""
    return sorted({device for device in devices if device.type == _ACCELERATOR}, key=str)


def random_state(device: torch.device) -> Tensor | None:
    """The random state of an accelerator; None for a CPU, which uses the host's."""
    return torch.cuda.get_rng_state(device) if device.type == _ACCELERATOR else None


def set_random_state(device: torch.device, state: Tensor) -> None:
    if device.type == _ACCELERATOR:
        torch.cuda.set_rng_state(state, device)


class Event:
    """A point in the current stream of a device, after all work submitted so far."""

    __slots__ = ("_event",)

    def __init__(self, device: torch.device, timing: bool = False) -> None:
        self._event: Any = None
        if not is_host(device):
            self._event = torch.cuda.Event(enable_timing=timing)
            self._event.record(torch.cuda.current_stream(device))

    def synchronize(self) -> None:
        """Wait, in any thread, until the device has reached this point."""
        if self._event is not None:
            self._event.synchronize()

    def precede(self, device: torch.device) -> None:
        """Make the device's current stream wait for this point before it begins later work."""
        if self._event is not None:
            torch.cuda.current_stream(device).wait_event(self._event)

    def seconds_until(self, later: Event) -> float:
        """Seconds between two events that have timing and are complete."""
        return float(self._event.elapsed_time(later._event)) / 1e3


class HostValue:
    """The value of a 0-d tensor, which is copied to the host while host and device go on."""

    def __init__(self, tensor: Tensor) -> None:
        device = tensor.device
        self._copy = tensor if is_host(device) else pinned_like(tensor, device).copy_(tensor, non_blocking=True)
        self._copied = Event(device)

    def get(self) -> float:
        """The value. Waits until the device has come to the copy."""
        self._copied.synchronize()
        return float(self._copy)


class CopyStream:
    """A stream of an accelerator for copies, besides the one that computes."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._device = device

    @contextmanager
    def entered(self, after: Event | None = None) -> Iterator[None]:
        """Within the context this thread submits work to the stream, which begins after the event `after`."""
        with torch.cuda.stream(self._stream):
            if after is not None:
                after.precede(self._device)
            yield


def keep_for_current_stream(tensor: Tensor) -> None:
    """Keep the tensor's memory from reuse until the current stream has finished its work so far."""
    if not is_host(tensor.device):
        tensor.record_stream(torch.cuda.current_stream(tensor.device))


def page_memory(num_bytes: int, pinned: bool = False) -> Tensor:
    """New host memory that files are read into and written from: flat uint8 of `padded(num_bytes)`, page aligned."""
    size = padded(num_bytes)
    if size == 0:
        return torch.empty(0, dtype=torch.uint8)
    memory = torch.empty(size + PAGE, dtype=torch.uint8, pin_memory=pinned)
    return memory.narrow(0, -memory.data_ptr() % PAGE, size)
