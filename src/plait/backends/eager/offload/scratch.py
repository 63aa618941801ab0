"""The folder for what a plan keeps on disk while it trains: where it is, and whether it can be used."""

from __future__ import annotations

import os
import tempfile
import warnings
from pathlib import Path

from plait.errors import HomeError

_IN_MEMORY = ("tmpfs", "ramfs")


def scratch_folder(given: str | Path | None) -> Path:
    """The folder given, or else TMPDIR, /var/tmp or what tempfile finds. HomeError where no file can be made in it."""
    folder = Path(given) if given is not None else _default()
    remedy = "give another folder as Trainer(..., scratch=...) or train.scratch"
    if not folder.is_dir():
        what = "is a file, not a folder" if folder.exists() else "does not exist; make it"
        raise HomeError(f"the folder {folder} for what the plan keeps on disk {what}, or {remedy}")
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise HomeError(
            f"no file can be made in {folder}, the folder for what the plan keeps on disk: {error.strerror}; {remedy}"
        ) from None
    return folder


def warn_of_memory(folder: Path) -> None:
    """Say so if the folder is not on a disk but in memory."""
    if _file_system(folder) in _IN_MEMORY:
        warnings.warn(
            f"{folder}, the folder for what the plan keeps on disk, lies in memory ({_file_system(folder)}); to save"
            " memory give one on a disk as Trainer(..., scratch=...) or train.scratch",
            stacklevel=4,
        )


def _default() -> Path:
    if "TMPDIR" in os.environ:
        return Path(os.environ["TMPDIR"])
    large = Path("/var/tmp")  # for large files, where /tmp may lie in memory
    return large if large.is_dir() and os.access(large, os.W_OK) else Path(tempfile.gettempdir())


def _file_system(folder: Path) -> str:
    """The type of the file system that holds the folder; '' where the system does not say."""
    try:
        lines = Path("/proc/self/mounts").read_text().splitlines()
    except OSError:
        return ""
    where = folder.resolve()
    found = [(fields[1], fields[2]) for line in lines if len(fields := line.split()) > 2]
    around = [(mount, kind) for mount, kind in found if where.is_relative_to(mount)]
    return max(around, key=lambda one: len(one[0]), default=("", ""))[1]
