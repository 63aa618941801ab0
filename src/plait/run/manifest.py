"""The manifest of a checkpoint: what it holds, and the size and checksum of every file."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from plait.errors import CheckpointError

NAME = "manifest.json"
FORMAT = 1


@dataclass(frozen=True)
class FileEntry:
    """A file of the checkpoint: its size in bytes and its SHA-256 in hex."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """`tensors` gives [shape, dtype] by flat name; `saved_at` is in seconds since 1970."""

    step: int
    plan: str
    saved_at: float
    files: dict[str, FileEntry]
    tensors: dict[str, tuple[list[int], str]]
    extra: dict[str, Any]
    format: int = FORMAT

    def write(self, folder: Path) -> None:
        """Write into `folder`, in one go and down to the disk."""
        body = json.dumps(asdict(self), indent=1, sort_keys=True)
        with open(folder / NAME, "w") as file:
            json.dump({"sha256": _digest(body.encode()), "body": body}, file)
            file.flush()
            os.fsync(file.fileno())

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """The manifest of a checkpoint folder; CheckpointError where it is missing, altered or of another format."""
        path = folder / NAME
        try:
            outer = json.loads(path.read_text())
            body = outer["body"]
            whole = outer["sha256"] == _digest(body.encode())
        except FileNotFoundError:
            raise CheckpointError(f"{folder} is no checkpoint: it has no {NAME}") from None
        except (ValueError, KeyError, TypeError, AttributeError):
            whole = False
        if not whole:
            raise CheckpointError(f"{path} is damaged; load an older checkpoint from {folder.parent}")
        found = json.loads(body)
        if found["format"] != FORMAT:
            raise CheckpointError(f"{folder} has format {found['format']}; this version of plait reads format {FORMAT}")
        files = {name: FileEntry(**entry) for name, entry in found.pop("files").items()}
        return cls(files=files, **found)

    def check_files(self, folder: Path) -> None:
        """Raise CheckpointError naming the first file that is missing, truncated or altered."""
        for name, entry in self.files.items():
            path = folder / name
            remedy = f"load an older checkpoint from {folder.parent}"
            if not path.exists():
                raise CheckpointError(f"the checkpoint {folder} is damaged: {name} is missing; {remedy}")
            if (size := path.stat().st_size) != entry.bytes:
                raise CheckpointError(
                    f"the checkpoint {folder} is damaged: {name} has {size} bytes, not {entry.bytes}; {remedy}"
                )
            if file_entry(path) != entry:
                raise CheckpointError(f"the checkpoint {folder} is damaged: {name} was altered; {remedy}")


def file_entry(path: Path) -> FileEntry:
    with open(path, "rb") as file:
        return FileEntry(path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest())


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
