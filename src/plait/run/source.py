"""Tensors in files, and boxes of them read: what is needed is checked by its checksums, then put where it belongs.

Every rank reads what it needs and no more, each range of bytes in one go, from a few threads.
"""

from __future__ import annotations

import json
import math
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from plait.errors import CheckpointError
from plait.run.boxes import Box, Fragment
from plait.run.checking import in_threads, read_checked
from plait.run.manifest import BLOCK, FileEntry, Manifest, Part
from plait.run.safetensor import item_bytes, read_header
from plait.run.storage import Folder, Location, folder_of

_AT_ONCE = 16 * BLOCK
_NOWHERE = torch.empty(0)
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


@dataclass(frozen=True)
class Wanted:
    """Fragments of a tensor, and the tensor (on any device, of any dtype) that they are written into."""

    fragments: tuple[Fragment, ...]
    into: Tensor


def whole_of(tensor: Tensor) -> Wanted:
    """All of a tensor, into the tensor given."""
    shape = tuple(tensor.shape)
    return Wanted((Fragment(Box.whole(shape), (0,) * len(shape)),) if tensor.numel() else (), tensor)


@dataclass(frozen=True)
class Source:
    """Tensors in the files of a folder: their whole shapes and dtypes, their parts, and checksums of some `files`."""

    folder: Folder
    tensors: Mapping[str, tuple[tuple[int, ...], str]]
    parts: Mapping[str, list[Part]]
    files: Mapping[str, FileEntry]

    @classmethod
    def checkpoint(cls, folder: Folder, manifest: Manifest) -> Source:
        return cls(folder, manifest.tensors, manifest.parts(), manifest.files)

    @classmethod
    def safetensors(cls, path: Location) -> Source:
        """A file, or a folder that has one or several with an index, as Hugging Face lays them out."""
        folder, names = _safetensors_files(path)
        tensors, parts = {}, {}
        for name in names:
            size = folder.size(name)
            if size is None:
                raise CheckpointError(f"{folder} has no {name}, which its {INDEX} names")
            for entry in read_header(f"{folder}/{name}", size, _reader(folder, name)):
                tensors[entry.name] = (entry.shape, entry.dtype)
                parts[entry.name] = [Part(name, entry.offset, Box.whole(entry.shape))]
        return cls(folder, tensors, parts, {})

    def check(self, needed: Mapping[str, tuple[Fragment, ...]]) -> None:
        """Read what is needed and raise CheckpointError naming the first file that was altered there."""
        self._read([job for name, held in needed.items() for job in self._jobs(name, Wanted(held, _NOWHERE))])

    def fill(self, wanted: Mapping[str, Wanted]) -> None:
        """Write what is wanted where it is wanted, after a look at its checksums."""
        self._read([job for name, one in wanted.items() for job in self._jobs(name, one)])

    def _read(self, jobs: list[_Job]) -> None:
        """Do the jobs, those that lie side by side in a file after one read."""
        groups: list[list[_Job]] = []
        for job in sorted(jobs, key=lambda job: (job.file, job.start)):
            near = groups and groups[-1][0].file == job.file and job.start - groups[-1][-1].stop < BLOCK
            if not near or job.stop - groups[-1][0].start > _AT_ONCE:
                groups.append([])
            groups[-1].append(job)
        own = threading.local()

        def read(group: list[_Job]) -> None:
            file, entry = group[0].file, self.files.get(group[0].file)
            start, stop = group[0].start // BLOCK * BLOCK, max(job.stop for job in group)
            if entry is not None:
                stop = min(-(-stop // BLOCK) * BLOCK, entry.bytes)
            if not hasattr(own, "memory") or own.memory.numel() < stop - start:
                own.memory = torch.empty(stop - start, dtype=torch.uint8)
            read_checked(self.folder, file, entry, start, memoryview(own.memory[: stop - start].numpy()))
            for job in group:
                job.put(own.memory[job.start - start : job.stop - start])

        in_threads(groups, read)

    def _overlaps(self, name: str, fragments: tuple[Fragment, ...]) -> Iterator[tuple[Part, Fragment, Box]]:
        missing = sum(fragment.box.num_elements for fragment in fragments)
        for fragment in fragments:
            for part in self.parts[name]:
                if common := part.box.overlap(fragment.box):
                    missing -= common.num_elements
                    yield part, fragment, common
        if missing:
            raise CheckpointError(f"{self.folder} lacks {missing} elements of {name}")

    def _rows(self, name: str, part: Part, common: Box) -> tuple[int, int, int]:
        """The first row of the part that has any of `common`, the row after the last, and the bytes of a row."""
        row = math.prod(part.box.shape[1:]) * item_bytes(self.tensors[name][1])
        if not common.shape:
            return 0, 1, row
        first = common.start[0] - part.box.start[0]
        return first, first + common.shape[0], row

    def _jobs(self, name: str, one: Wanted) -> Iterator[_Job]:
        dtype = getattr(torch, self.tensors[name][1])
        for part, fragment, common in self._overlaps(name, one.fragments):
            target = None
            if one.into is not _NOWHERE:
                places = zip(fragment.at, fragment.box.start, common.start, common.shape, strict=True)
                target = one.into.detach()[tuple(slice(at + c - b, at + c - b + n) for at, b, c, n in places)]
            first, last, row = self._rows(name, part, common)
            columns = common.within(part.box)[1:]
            step = max(1, _AT_ONCE // 2 // max(row, 1))
            for start in range(first, last, step):
                stop = min(start + step, last)
                shape = (stop - start, *part.box.shape[1:]) if part.box.shape else ()
                into = target[start - first : stop - first] if target is not None and shape else target
                yield _Job(part.file, part.offset + start * row, part.offset + stop * row, dtype, shape, columns, into)


@dataclass(frozen=True)
class _Job:
    """Bytes of a file that are rows of `shape`, and the tensor that some columns of them are put into."""

    file: str
    start: int
    stop: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    columns: tuple[slice, ...]
    into: Tensor | None

    def put(self, memory: Tensor) -> None:
        if self.into is not None:
            found = memory.view(self.dtype).view(self.shape)
            with torch.no_grad():
                self.into.copy_(found[(slice(None), *self.columns)] if self.shape else found)


def _reader(folder: Folder, name: str) -> Callable[[int, int], bytes]:
    def read(offset: int, num: int) -> bytes:
        memory = bytearray(num)
        return bytes(memory[: folder.read_into(name, offset, memoryview(memory))])

    return read


def _safetensors_files(path: Location) -> tuple[Folder, list[str]]:
    text = os.fspath(path)
    if text.endswith(".safetensors"):
        parent, slash, name = text.rpartition("/")
        folder = folder_of(parent or slash or ".")
        if folder.size(name) is None:
            raise CheckpointError(f"there is no file {text}")
        return folder, [name]
    folder = folder_of(path)
    names = folder.names()
    if INDEX in names:
        try:
            return folder, sorted(set(json.loads(folder.read(INDEX))["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{folder}/{INDEX} cannot be read: {error}") from None
    if SINGLE in names:
        return folder, [SINGLE]
    raise CheckpointError(f"{folder} has no checkpoint, no {SINGLE} and no {INDEX}: there are no weights to load")
