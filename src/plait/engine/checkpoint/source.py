"""Reads blocks of tensors from files: verifies the checksums of the bytes that are needed, then copies them into
place.

Every rank reads only what it needs, each range of bytes at once, in a few threads.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated

import torch
from pydantic import BaseModel, Field, TypeAdapter
from torch import Tensor

from plait.comm.device import is_host
from plait.engine.checkpoint.checkpoint_folders import check_blocks, in_threads
from plait.engine.checkpoint.json_values import FileName, Text, checked, read_json
from plait.engine.checkpoint.manifest import BLOCK, FileEntry, Manifest, StoredPart
from plait.engine.checkpoint.safetensor import item_bytes, read_header
from plait.engine.checkpoint.storage import Folder, Location, folder_of
from plait.engine.slices import Fragment, TensorSlice
from plait.errors import CheckpointError

_CHUNK = 16 << 20
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


@dataclass(frozen=True)
class Wanted:
    """Fragments of a tensor, and the tensor, on any device and of any dtype, that they are read into."""

    fragments: tuple[Fragment, ...]
    into: Tensor


def whole_of(tensor: Tensor) -> Wanted:
    """The whole of a tensor, to be read into the given tensor."""
    shape = tuple(tensor.shape)
    return Wanted((Fragment(TensorSlice.whole(shape), (0,) * len(shape)),) if tensor.numel() else (), tensor)


@dataclass(frozen=True)
class Source:
    """Tensors in the files of a folder.

    tensors  (shape, dtype) of the whole tensors, by name
    parts    where the parts of each tensor are stored
    files    the checksums of the files; empty for files without
    """

    folder: Folder
    tensors: Mapping[str, tuple[tuple[int, ...], str]]
    parts: Mapping[str, list[StoredPart]]
    files: Mapping[str, FileEntry]

    @classmethod
    def checkpoint(cls, folder: Folder, manifest: Manifest) -> Source:
        """The tensors of a checkpoint."""
        return cls(folder, manifest.tensors, manifest.parts(), manifest.files)

    @classmethod
    def safetensors(cls, path: Location) -> Source:
        """The tensors of a safetensors file, or of a folder with one file or several and an index, as Hugging Face
        writes them.

        Raises CheckpointError for files that are missing or invalid.
        """
        folder, names, places = _safetensors_files(path)
        tensors: dict[str, tuple[tuple[int, ...], str]] = {}
        parts: dict[str, list[StoredPart]] = {}
        for name in names:
            size = folder.size(name)
            if size is None:
                raise CheckpointError(f"{folder} has no {name}, which its {INDEX} names")
            try:
                entries = read_header(f"{folder}/{name}", size, _reader(folder, name))
            except OSError as error:
                raise CheckpointError(f"cannot read {folder}/{name}: {error.strerror or error}") from None
            for entry in entries:
                if places and places.get(entry.name) != name:
                    continue
                tensors[entry.name] = (entry.shape, entry.dtype)
                parts[entry.name] = [StoredPart(name, entry.offset, TensorSlice.whole(entry.shape))]
        if missing := next((name for name in places if name not in tensors), None):
            raise CheckpointError(f"{folder}/{INDEX} says that {places[missing]} has {missing}, which it has not")
        return cls(folder, tensors, parts, {})

    def check(self, needed: Mapping[str, tuple[Fragment, ...]]) -> None:
        """Raise CheckpointError, which names the first file, if a needed block was altered."""
        blocks: dict[str, set[int]] = {}
        for name, fragments in needed.items():
            for part, _, common in self._overlaps(name, fragments):
                first, last, row = self._rows(name, part, common)
                start, stop = part.offset + first * row, part.offset + last * row
                blocks.setdefault(part.file, set()).update(range(start // BLOCK, -(-stop // BLOCK)))
        check_blocks(self.folder, self.files, [(file, i) for file in sorted(blocks) for i in sorted(blocks[file])])

    def fill(self, wanted: Mapping[str, Wanted]) -> None:
        """Read the wanted fragments into their tensors."""
        in_threads([job for name, one in wanted.items() for job in self._jobs(name, one)], lambda job: job())

    def _overlaps(
        self, name: str, fragments: tuple[Fragment, ...]
    ) -> Iterator[tuple[StoredPart, Fragment, TensorSlice]]:
        """(stored part, fragment, their common block) for all parts that overlap the fragments."""
        missing = sum(fragment.block.num_elements for fragment in fragments)
        for fragment in fragments:
            for part in self.parts[name]:
                if common := part.block.overlap(fragment.block):
                    missing -= common.num_elements
                    yield part, fragment, common
        if missing:
            raise CheckpointError(f"{self.folder} lacks {missing} elements of {name}")

    def _rows(self, name: str, part: StoredPart, common: TensorSlice) -> tuple[int, int, int]:
        """The first row of the part that has any of `common`, the row after the last such row, and the bytes of a
        row."""
        row = math.prod(part.block.shape[1:]) * item_bytes(self.tensors[name][1])
        if not common.shape:
            return 0, 1, row
        first = common.start[0] - part.block.start[0]
        return first, first + common.shape[0], row

    def _jobs(self, name: str, one: Wanted) -> Iterator[Callable[[], None]]:
        """Functions that each read some rows of what is wanted."""
        dtype = getattr(torch, self.tensors[name][1])
        for part, fragment, common in self._overlaps(name, one.fragments):
            places = zip(fragment.at, fragment.block.start, common.start, common.shape, strict=True)
            target = one.into.detach()[tuple(slice(at + c - b, at + c - b + n) for at, b, c, n in places)]
            first, last, row = self._rows(name, part, common)
            columns = common.within(part.block)[1:]
            step = max(1, _CHUNK // max(row, 1))
            for start in range(first, last, step):
                stop = min(start + step, last)
                some = target[start - first : stop - first] if common.shape else target
                yield self._job(part, (start, stop), row, dtype, columns, some)

    def _job(
        self,
        part: StoredPart,
        rows: tuple[int, int],
        row: int,
        dtype: torch.dtype,
        columns: tuple[slice, ...],
        into: Tensor,
    ) -> Callable[[], None]:
        """A function that reads these rows of a part, and copies these columns of them into a tensor."""
        offset, num = part.offset + rows[0] * row, (rows[1] - rows[0]) * row

        def run() -> None:
            plain = is_host(into.device) and into.is_contiguous() and into.dtype == dtype
            if plain and into.nbytes == num:
                self._read(part.file, offset, into.view(-1).view(torch.uint8))
                return
            memory = torch.empty(num, dtype=torch.uint8)
            self._read(part.file, offset, memory)
            shape = (rows[1] - rows[0], *part.block.shape[1:]) if part.block.shape else ()
            found = memory.view(dtype).view(shape)
            with torch.no_grad():
                into.copy_(found[(slice(None), *columns)] if shape else found)

        return run

    def _read(self, file: str, offset: int, memory: Tensor) -> None:
        view = memory.numpy().data
        try:
            num = self.folder.read_into(file, offset, view)
        except OSError as error:
            raise CheckpointError(f"cannot read {self.folder}/{file}: {error.strerror or error}") from None
        if num != len(view):
            raise CheckpointError(f"{self.folder}/{file} ends at byte {offset + num}, before what is needed")


def _reader(folder: Folder, name: str) -> Callable[[int, int], bytes]:
    def read(offset: int, num: int) -> bytes:
        memory = bytearray(num)
        return bytes(memory[: folder.read_into(name, offset, memoryview(memory))])

    return read


def _safetensors_files(path: Location) -> tuple[Folder, list[str], dict[str, str]]:
    """The folder, its safetensors files, and with an index the file of each tensor, by name.

    Links are followed, because the cache of the Hugging Face hub consists of them.
    """
    text = os.fspath(path)
    if text.endswith(".safetensors"):
        parent, slash, name = text.rpartition("/")
        folder = folder_of(parent or slash or ".", links=True)
        if folder.size(name) is None:
            raise CheckpointError(f"there is no file {text}")
        return folder, [name], {}
    folder = folder_of(path, links=True)
    names = folder.names()
    if INDEX in names:
        where = f"{folder}/{INDEX}"
        try:
            found = read_json(folder.read(INDEX), where)
        except OSError as error:
            raise CheckpointError(f"cannot read {where}: {error.strerror or error}") from None
        places = checked(_INDEX, found, where).weight_map
        return folder, sorted(set(places.values())), places
    if SINGLE in names:
        return folder, [SINGLE], {}
    raise CheckpointError(f"{folder} has no checkpoint, no {SINGLE} and no {INDEX}: there are no weights to load")


class _Index(BaseModel):
    weight_map: Annotated[dict[Text, FileName], Field(min_length=1)]


_INDEX = TypeAdapter(_Index)
