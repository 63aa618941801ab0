"""Keeps one rank's offloaded tensors, in host memory or in a scratch file on disk.

Copies between a device and its host's memory are asynchronous: on an accelerator they run in a stream of their own,
beside the one that computes, and host memory is pinned. On a CPU both are the same memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from plait.backends.eager.offload.disk import DiskFile, DiskPlace, Transfer, scratch_folder, warn_of_memory
from plait.comm.device import CopyStream, Event, is_host, keep_for_current_stream, page_memory, pinned_like
from plait.comm.protocol import World
from plait.cost.memory_model import padded
from plait.plan.plan import Plan


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


_MOST_UNWRITTEN = 32 << 20  # bytes that may wait to be written


@dataclass
class _Stashed:
    """A stashed tensor, in host memory or in a place on disk."""

    host: Tensor | None
    place: DiskPlace | None


class _Arrival:
    """Tensors in flight to the device, each with a function that waits until its copy has started."""

    def __init__(self, steps: list[tuple[Callable[[], None], ArrivingTensor]]) -> None:
        self._steps = steps

    def wait(self) -> list[Tensor]:
        found = []
        for wait, arriving in self._steps:
            wait()
            found.append(arriving.take())
        self._steps = []
        return found


class Offload:
    """The offloaded tensors of one rank, by key (an OffloadStore for graphs).

    `scratch` is the folder of the rank's file, which is opened when the first tensor is kept there; `file` replaces it.
    HomeError if no file can be made in the folder.
    """

    def __init__(
        self, plan: Plan, world: World, scratch: str | Path | None = None, file: DiskFile | None = None
    ) -> None:
        self.plan = plan
        self.world = world
        self.copies = HostCopies(world.device)
        self.forms: dict[str, Tensor] = {}  # shape, dtype and strides of parameters that the host updates, by name
        self.norms: dict[str, Tensor] = {}  # norms of the gradients offloaded in this step, by name
        self.factor = 1.0  # by which those gradients must be multiplied
        self._file = file
        self._folder: Path | None = None
        self._hosts: dict[str, Tensor] = {}  # by key
        self._places: dict[str, DiskPlace] = {}  # by key
        self._waits: dict[str, Callable[[], None]] = {}  # wait for copies to host memory in flight, by key
        self._writes: deque[tuple[Transfer, int]] = deque()  # in flight, with their bytes
        self._unwritten = 0  # those bytes
        self._stash_start = self._stash_bytes = 0
        if file is None and (scratch is not None or plan.uses_disk):
            self._folder = scratch_folder(scratch)
            if plan.uses_disk and world.rank == 0:
                warn_of_memory(self._folder)

    @property
    def file(self) -> DiskFile:
        """The rank's file, made when it is first needed."""
        if self._file is None:
            assert self._folder is not None
            self._file = DiskFile(self._folder, f"rank{self.world.rank}")
        return self._file

    def close(self) -> None:
        """Delete the file and the tensors in it."""
        if self._file is not None:
            self._file.close()
            self._file = None

    # Called by graphs, as OffloadStore says.

    def fetch(self, keys: Sequence[str]) -> _Arrival:
        return _Arrival([self._bring(self._hosts.get(key), self._places.get(key)) for key in keys])

    def leave(self, key: str, tensor: Tensor) -> None:
        kind, _, name = key.partition("/")
        if kind == "gradient":
            self.norms[name] = torch.linalg.vector_norm(tensor)
            if tensor.stride() != (form := self.forms[name]).stride():  # fused optimizers walk both side by side
                tensor = torch.empty_like(form, device=tensor.device).copy_(tensor)
        self.put(key, tensor)

    def stash(self, offset: int, tensor: Tensor) -> _Stashed:
        if self.plan.home_activations == "host":
            host = self.copies.host_like(tensor)
            self.copies.down(tensor, host)
            return _Stashed(host, None)
        assert offset + padded(tensor.nbytes) <= self._stash_bytes
        place = DiskPlace(self.file, self._stash_start + offset, tensor)
        self._write(place, tensor)
        return _Stashed(None, place)

    def unstash(self, stashed: Sequence[_Stashed]) -> _Arrival:
        return _Arrival([self._bring(one.host, one.place) for one in stashed])

    def make_room(self, num_bytes: int) -> None:
        """Reserve room on disk for what a graph stashes at once."""
        if num_bytes > self._stash_bytes and self.plan.home_activations == "disk":
            self._stash_start = self.file.take(num_bytes, "activations")
            self._stash_bytes = num_bytes

    # Called by the engine.

    def begin_step(self) -> None:
        """Forget the norms of the last step's gradients."""
        self.norms.clear()
        self.factor = 1.0

    def put(self, key: str, tensor: Tensor) -> None:
        """Start to copy a tensor of the device, to be kept under the key."""
        if self.plan.home_parameters != "disk":
            host = self._hosts.get(key)
            if host is None:
                host = self._hosts[key] = self.copies.host_like(tensor)
            self._waits[key] = self.copies.down(tensor, host)
            return
        place = self._places.get(key)
        if place is None or not place.fits(torch.empty_like(tensor, device="meta")):
            place = self._places[key] = self.file.place(tensor, "parameters and gradients")
        self._write(place, tensor)

    def share(self, key: str, other: str) -> None:
        """Let `key` name the tensor that `other` names."""
        tables: tuple[dict[str, Any], ...] = (self._hosts, self._places)
        for kept in tables:
            if other in kept:
                kept[key] = kept[other]

    def lend(self, key: str, tensor: Tensor) -> None:
        """Keep a tensor in host memory under the key without a copy; its owner may change it."""
        self._hosts[key] = tensor

    def place(self, key: str) -> DiskPlace | None:
        """The tensor's place on disk; None if it is in host memory."""
        return self._places.get(key)

    def in_memory(self, key: str) -> Tensor | None:
        """Wait for the tensor in host memory and return it; None if it is on disk."""
        if wait := self._waits.pop(key, None):
            wait()
        return self._hosts.get(key)

    def get(self, key: str) -> Tensor:
        """The tensor in host memory, or a copy of the one on disk."""
        kept = self.in_memory(key)
        return self._places[key].get() if kept is None else kept

    def _bring(self, host: Tensor | None, place: DiskPlace | None) -> tuple[Callable[[], None], ArrivingTensor]:
        """Start to bring a tensor from host memory, or else from disk, to the device."""
        if host is not None:
            arriving = ArrivingTensor(self.copies, host)
            arriving.land(host)
            return _nothing, arriving
        assert place is not None
        arriving = ArrivingTensor(self.copies, place.form)
        memory = page_memory(place.num_bytes, pinned=not self.copies.is_host)
        reading = place.read(memory)
        if self.copies.is_host:
            arriving.land(place.view(memory))
            return reading.wait, arriving

        def land() -> None:
            reading.wait()
            arriving.land(place.view(memory))

        landed = self.file.submit(land)
        return landed.wait, arriving

    def _write(self, place: DiskPlace, tensor: Tensor) -> None:
        while self._writes and (self._unwritten + place.num_bytes > _MOST_UNWRITTEN or self._writes[0][0].done):
            transfer, num_bytes = self._writes.popleft()
            self._unwritten -= num_bytes
            transfer.wait()
        memory = page_memory(place.num_bytes, pinned=not self.copies.is_host)
        copied = self.file.submit(self.copies.down(tensor, place.view(memory)))
        self._writes.append((place.write(memory, copied), place.num_bytes))
        self._unwritten += place.num_bytes


def hollow(form: Tensor) -> Tensor:
    """A tensor of the form's shape and dtype, backed by one element, that reads as NaN and cannot be written to."""
    value = float("nan") if form.is_floating_point() else 0
    return torch.full((), value, dtype=form.dtype).expand(form.shape)


def _nothing() -> None:
    pass
