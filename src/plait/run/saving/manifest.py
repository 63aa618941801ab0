"""The manifest of a checkpoint: what it holds, where each part of a tensor lies, and the checksums of every file.

It is written last, so a folder that has one is a whole checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from plait.errors import CheckpointError
from plait.run.boxes import Box
from plait.run.saving.crc import combine
from plait.run.saving.safetensor import item_bytes
from plait.run.saving.storage import Folder

NAME = "manifest.json"
FORMAT = 2
BLOCK = 8 << 20  # bytes that have a checksum of their own, so that a rank can check what it reads


@dataclass(frozen=True)
class FileEntry:
    """A file: its bytes, the CRC-32 of each block of it, and the tensors in it: {name: (start, shape, first byte)}."""

    bytes: int
    blocks: tuple[int, ...]
    tensors: dict[str, tuple[tuple[int, ...], tuple[int, ...], int]]

    @property
    def crc32(self) -> int:
        """The checksum of the whole file, as any tool gives it."""
        return combine(self.blocks, BLOCK, self.bytes)

    def plain(self) -> dict[str, Any]:
        return {"bytes": self.bytes, "crc32": "".join(f"{crc:08x}" for crc in self.blocks), "tensors": self.tensors}

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> FileEntry:
        crcs = re.findall("........", plain["crc32"])
        tensors = {n: (tuple(start), tuple(shape), at) for n, (start, shape, at) in plain["tensors"].items()}
        return cls(plain["bytes"], tuple(int(crc, 16) for crc in crcs), tensors)


@dataclass(frozen=True)
class Part:
    """Where a part of a tensor lies."""

    file: str
    offset: int
    box: Box


@dataclass(frozen=True)
class Manifest:
    """`tensors` gives (shape, dtype) by name; `values` has all that is no tensor; `saved_at` is seconds since 1970."""

    step: int
    plan: str
    saved_at: float
    tensors: dict[str, tuple[tuple[int, ...], str]]
    files: dict[str, FileEntry]
    values: dict[str, Any]
    format: int = FORMAT

    def num_bytes(self, name: str) -> int:
        shape, dtype = self.tensors[name]
        return math.prod(shape) * item_bytes(dtype)

    def parts(self) -> dict[str, list[Part]]:
        """The parts of each tensor, which are the whole of it."""
        found: dict[str, list[Part]] = {name: [] for name in self.tensors}
        for file, entry in self.files.items():
            for name, (start, shape, at) in entry.tensors.items():
                found[name].append(Part(file, at, Box(start, shape)))
        return found

    def write(self, folder: Folder) -> None:
        """Write into `folder`, in one go and down to the disk."""
        files = {name: entry.plain() for name, entry in self.files.items()}
        plain = {key: value for key, value in vars(self).items() if key != "files"} | {"files": files}
        body = json.dumps(plain, sort_keys=True, separators=(",", ":"))
        outer = {"saved_at": self.saved_at, "sha256": _digest(body), "body": body}
        folder.put(NAME, [json.dumps(outer).encode()])

    @classmethod
    def read(cls, folder: Folder) -> Manifest:
        """The manifest of a checkpoint folder; CheckpointError where it is missing, altered or of another format."""
        try:
            text = folder.read(NAME)
        except (FileNotFoundError, NotADirectoryError):
            raise CheckpointError(f"{folder} is no checkpoint: it has no {NAME}") from None
        except OSError as error:
            raise CheckpointError(f"cannot read {folder}/{NAME}: {error.strerror or error}") from None
        try:
            outer = json.loads(text)
            body, expected = outer["body"], outer["sha256"]
            found = _digest(body)
        except (ValueError, KeyError, TypeError, AttributeError):
            raise CheckpointError(f"{folder}/{NAME} is damaged: it cannot be read") from None
        if found != expected:
            raise CheckpointError(f"{folder}/{NAME} is damaged: its text has sha256 {found}, not {expected}")
        plain = json.loads(body)
        if plain["format"] != FORMAT:
            raise CheckpointError(f"{folder} has format {plain['format']}; this version of plait reads format {FORMAT}")
        files = {name: FileEntry.of(entry) for name, entry in plain.pop("files").items()}
        tensors = {name: (tuple(shape), dtype) for name, (shape, dtype) in plain.pop("tensors").items()}
        return cls(files=files, tensors=tensors, **plain)


def saved_at(folder: Folder) -> float | None:
    """When a checkpoint was saved, without a look at the rest of its manifest; None where that cannot be read."""
    start = bytearray(100)
    try:
        folder.read_into(NAME, 0, memoryview(start))
    except OSError:
        return None
    found = re.match(rb'\{"saved_at": ([0-9.e+]+),', start)
    return float(found[1]) if found else None


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
