"""Where one rank's tensors are while they are away from its device: in host memory, or in its file on disk."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from plait.backends.eager.offload.disk import DiskFile, DiskPlace, Transfer
from plait.backends.eager.offload.host_copies import ArrivingTensor, HostCopies
from plait.backends.eager.offload.scratch import scratch_folder, warn_of_memory
from plait.backends.eager.page_memory import page_memory
from plait.comm.protocol import World
from plait.cost.memory_model import padded
from plait.plan.plan import Plan

_UNDER_WAY = 32 << 20  # bytes that may wait to be written


@dataclass
class _Stashed:
    """A value that is away: in host memory, or in a place on disk."""

    host: Tensor | None
    place: DiskPlace | None


class _Coming:
    """Tensors on their way to the device: `steps` end the way of each (see graph.homes.Coming)."""

    def __init__(self, steps: list[tuple[Callable[[], None], ArrivingTensor]]) -> None:
        self._steps = steps

    def wait(self) -> list[Tensor]:
        found = []
        for end, landing in self._steps:
            end()
            found.append(landing.take())
        self._steps = []
        return found


class Offload:
    """The homes of one rank (see graph.homes). `scratch` is the folder of its file, which is opened when something is
    first kept there, unless a `file` is given. HomeError for a folder in which no file can be made."""

    def __init__(
        self, plan: Plan, world: World, scratch: str | Path | None = None, file: DiskFile | None = None
    ) -> None:
        self.plan = plan
        self.world = world
        self.lane = HostCopies(world.device)
        self.forms: dict[str, Tensor] = {}  # of parameters that are updated elsewhere, by name
        self.norms: dict[str, Tensor] = {}  # of the gradients that have left in this step, by name
        self.factor = 1.0  # by which those are to be multiplied
        self._file = file
        self._folder: Path | None = None
        self._hosts: dict[str, Tensor] = {}  # by key; so are places
        self._places: dict[str, DiskPlace] = {}
        self._ends: dict[str, Callable[[], None]] = {}  # of copies to host memory under way
        self._under_way: deque[tuple[Transfer, int]] = deque()
        self._stash_start = self._stash_bytes = 0
        if file is None and (scratch is not None or plan.uses_disk):
            self._folder = scratch_folder(scratch)
            if plan.uses_disk and world.rank == 0:
                warn_of_memory(self._folder)

    @property
    def file(self) -> DiskFile:
        if self._file is None:
            assert self._folder is not None
            self._file = DiskFile(self._folder, f"rank{self.world.rank}")
        return self._file

    def close(self) -> None:
        """Give the room on disk back; what was kept there is gone."""
        if self._file is not None:
            self._file.close()
            self._file = None

    # What graphs call.

    def fetch(self, keys: Sequence[str]) -> _Coming:
        return _Coming([self._bring(self._hosts.get(key), self._places.get(key)) for key in keys])

    def leave(self, key: str, tensor: Tensor) -> None:
        kind, _, name = key.partition("/")
        if kind == "gradient":
            self.norms[name] = torch.linalg.vector_norm(tensor)
            if tensor.stride() != (form := self.forms[name]).stride():  # fused optimizers walk both side by side
                tensor = torch.empty_like(form, device=tensor.device).copy_(tensor)
        self.put(key, tensor)

    def stash(self, offset: int, tensor: Tensor) -> _Stashed:
        if self.plan.home_activations == "host":
            host = self.lane.host_like(tensor)
            self.lane.down(tensor, host)
            return _Stashed(host, None)
        assert offset + padded(tensor.nbytes) <= self._stash_bytes
        place = DiskPlace(self.file, self._stash_start + offset, tensor)
        self._write(place, tensor)
        return _Stashed(None, place)

    def unstash(self, stashed: Sequence[_Stashed]) -> _Coming:
        return _Coming([self._bring(one.host, one.place) for one in stashed])

    def make_room(self, num_bytes: int) -> None:
        """For what a graph stashes at once."""
        if num_bytes > self._stash_bytes and self.plan.home_activations == "disk":
            self._stash_start = self.file.take(num_bytes, "activations")
            self._stash_bytes = num_bytes

    # What the variables and the update call.

    def begin_step(self) -> None:
        self.norms.clear()
        self.factor = 1.0

    def put(self, key: str, tensor: Tensor) -> None:
        """Begin to keep a copy of a tensor of the device under the key."""
        if self.plan.home_parameters != "disk":
            host = self._hosts.get(key)
            if host is None:
                host = self._hosts[key] = self.lane.host_like(tensor)
            self._ends[key] = self.lane.down(tensor, host)
            return
        place = self._places.get(key)
        if place is None or not place.fits(torch.empty_like(tensor, device="meta")):
            place = self._places[key] = self.file.place(tensor, "parameters and gradients")
        self._write(place, tensor)

    def share(self, key: str, other: str) -> None:
        """Let `key` stand for what `other` does."""
        tables: tuple[dict[str, Any], ...] = (self._hosts, self._places)
        for kept in tables:
            if other in kept:
                kept[key] = kept[other]

    def lend(self, key: str, tensor: Tensor) -> None:
        """Let a tensor in host memory, which its owner changes, be what is kept under the key."""
        self._hosts[key] = tensor

    def place(self, key: str) -> DiskPlace | None:
        """Where on disk that is, if it is there."""
        return self._places.get(key)

    def in_memory(self, key: str) -> Tensor | None:
        """The tensor in host memory, once it is there; None of one on disk."""
        if end := self._ends.pop(key, None):
            end()
        return self._hosts.get(key)

    def get(self, key: str) -> Tensor:
        """The tensor in host memory; from disk as a copy."""
        kept = self.in_memory(key)
        return self._places[key].get() if kept is None else kept

    def _bring(self, host: Tensor | None, place: DiskPlace | None) -> tuple[Callable[[], None], ArrivingTensor]:
        """Begin to bring what is in host memory, or else on disk, to the device."""
        if host is not None:
            landing = self.lane.up(host)
            landing.land(host)
            return _nothing, landing
        assert place is not None
        landing = self.lane.up(place.form)
        memory = page_memory(place.num_bytes, pinned=not self.lane.is_host)
        reading = place.read(memory)
        if self.lane.is_host:
            landing.land(place.view(memory))
            return reading.wait, landing

        def land() -> None:
            reading.wait()
            landing.land(place.view(memory))

        landed = self.file.submit(land)
        return landed.wait, landing

    def _write(self, place: DiskPlace, tensor: Tensor) -> None:
        while self._under_way and sum(size for _, size in self._under_way) + place.num_bytes > _UNDER_WAY:
            self._under_way.popleft()[0].wait()
        memory = page_memory(place.num_bytes, pinned=not self.lane.is_host)
        copied = self.file.submit(self.lane.down(tensor, place.view(memory)))
        self._under_way.append((place.write(memory, copied), place.num_bytes))


def hollow(form: Tensor) -> Tensor:
    """A tensor of that form without memory of its own, which cannot be written to and reads as NaN."""
    value = float("nan") if form.is_floating_point() else 0
    return torch.full((), value, dtype=form.dtype).expand(form.shape)


def _nothing() -> None:
    pass
