"""Finds the checkpoints of a run, oldest first. Needs no torch."""

from __future__ import annotations

import os
import re
import threading
import zlib
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from plait.engine.checkpoint.manifest import BLOCK, NAME, FileEntry, Manifest, saved_at
from plait.engine.checkpoint.storage import Folder, Location, folder_of
from plait.errors import CheckpointError

_NAMED = re.compile(r"step-\d{8,}")
INSIDE = "checkpoints"  # the folder of checkpoints in `plait train`'s train.out


def newest(path: Location) -> Folder:
    """`path` if it is a checkpoint, else the last checkpoint saved into it or into its folder `checkpoints`.

    Raises CheckpointError if there is none.
    """
    folder = folder_of(path)
    if NAME in folder.names():
        return folder
    if _NAMED.fullmatch(folder.name):
        what = f"it has no {NAME}, so it was not finished, or is damaged" if folder.names() else "there is nothing"
        raise CheckpointError(f"there is no checkpoint {folder}: {what}")
    found = checkpoints(folder) or checkpoints(folder.child(INSIDE))
    if not found:
        started = folders(folder) or folders(folder.child(INSIDE))
        why = f"it has no {NAME}, so it was not finished, or is damaged"
        more = f", and {started[-1].name} is none: {why}" if started else ""
        raise CheckpointError(f"there is no checkpoint in {folder}; one is a folder named step-NUMBER{more}")
    return found[-1]


def has_checkpoints(path: Location) -> bool:
    """Whether `newest` finds a checkpoint there, even a damaged one."""
    folder = folder_of(path)
    return NAME in folder.names() or bool(
        _NAMED.fullmatch(folder.name) or folders(folder) or folders(folder.child(INSIDE))
    )


def checkpoints(path: Location | Folder) -> list[Folder]:
    """The checkpoints in a folder, in the order in which they were saved.

    One whose manifest cannot be read is placed after those of fewer steps, so that it is the newest only if it has the
    most.
    """
    found = [folder for folder in folders(path) if folder.size(NAME) is not None]
    saved = {folder.name: saved_at(folder) for folder in found}
    ages: list[tuple[float, bool, str, Folder]] = []
    for folder in found:
        when = saved[folder.name]
        if when is None:
            before = [at for name, at in saved.items() if at is not None and _step_of(name) < _step_of(folder.name)]
            ages.append((max(before, default=0.0), True, folder.name, folder))
        else:
            ages.append((when, False, folder.name, folder))
    return [folder for *_, folder in sorted(ages, key=lambda age: age[:3])]


def checkpoint_of(path: Location, step: str) -> Folder:
    """The checkpoint of a run by its name, step-120, or its step. Raises CheckpointError, which names the existing
    ones."""
    folder = folder_of(path)
    digits = step.removeprefix("step-")
    there = checkpoints(folder)
    found = [one for one in there if digits.isdigit() and _step_of(one.name) == int(digits)]
    if not found:
        names = ", ".join(one.name for one in there) or "none"
        raise CheckpointError(f"there is no checkpoint {step!r} in {folder}, which has {names}")
    return found[0]


def _step_of(name: str) -> int:
    return int(name.removeprefix("step-"))


def own_folders(path: Location | Folder) -> list[Folder]:
    """The folders that are not links: content of links is not changed."""
    return [folder for folder in folders(path) if not folder.is_link()]


def folders(path: Location | Folder) -> list[Folder]:
    """All folders that are named like a checkpoint, whether or not they are one."""
    folder = folder_of(path) if isinstance(path, (str, os.PathLike)) else path
    return [folder.child(name) for name in folder.names() if _NAMED.fullmatch(name)]


def older_than(folder: Folder) -> str:
    """The remedy for a checkpoint that does not load, as the end of a sentence."""
    parent = str(folder).rpartition("/")[0]
    others = [one for one in checkpoints(parent) if one.name != folder.name] if parent else []
    return f"; load an older one, {others[-1]} (plait train --checkpoint {others[-1].name})" if others else ""


T = TypeVar("T")

_READERS = 4  # threads, so that the disk is busy while checksums are computed, even on few cores


def damages(folder: Folder) -> list[str]:
    """The damages of a checkpoint, one message per damaged file, after reading every byte. Needs no model."""
    try:
        manifest = Manifest.read(folder)
    except CheckpointError as error:
        return [str(error)]
    found = []
    for name, entry in manifest.files.items():
        try:
            _check_file(folder, name, entry)
            check_blocks(folder, manifest.files, [(name, index) for index in range(len(entry.blocks))])
        except CheckpointError as error:
            found.append(str(error))
    return found


def check_files(folder: Folder) -> Manifest:
    """The manifest, if all its files exist with their sizes. Raises CheckpointError, which names a missing or
    truncated file."""
    manifest = Manifest.read(folder)
    for name, entry in manifest.files.items():
        _check_file(folder, name, entry)
    return manifest


def _check_file(folder: Folder, name: str, entry: FileEntry) -> None:
    """Raise CheckpointError if the file is missing or has another size."""
    size = folder.size(name)
    if size == entry.bytes:
        return
    what = f"has {size} bytes, not {entry.bytes}"
    if size is None:
        what = f"is {other}" if (other := folder.in_place_of(name)) else "is missing"
    raise CheckpointError(f"the checkpoint {folder} is damaged: {name} (crc32 {entry.crc32:08x}) {what}")


def check_blocks(folder: Folder, files: Mapping[str, FileEntry], blocks: Iterable[tuple[str, int]]) -> None:
    """Raise CheckpointError, which names the first file, if any of the blocks (file, index) was altered."""
    own = threading.local()

    def check(block: tuple[str, int]) -> None:
        name, index = block
        if name not in files:
            return
        entry, start = files[name], index * BLOCK
        if not hasattr(own, "memory"):
            own.memory = bytearray(BLOCK)
        memory = memoryview(own.memory)[: min(BLOCK, entry.bytes - start)]
        try:
            num = folder.read_into(name, start, memory)
        except OSError as error:
            raise CheckpointError(f"cannot read {folder}/{name}: {error.strerror or error}") from None
        found = zlib.crc32(memory[:num])
        if found != entry.blocks[index]:
            raise CheckpointError(
                f"the checkpoint {folder} is damaged: {name} (crc32 {entry.crc32:08x}) was altered: its bytes from"
                f" {start} to {start + len(memory)} have crc32 {found:08x}, not {entry.blocks[index]:08x}"
            )

    in_threads(list(blocks), check)


def in_threads(items: list[T], work: Callable[[T], None]) -> None:
    """Do the work on every item, in a few threads. Raises the error of the first item that failed."""
    num = min(_READERS, len(items))
    if num <= 1:
        for item in items:
            work(item)
        return
    with ThreadPoolExecutor(num, thread_name_prefix="plait reader") as threads:
        results = [threads.submit(work, item) for item in items]
        try:
            for result in results:
                result.result()
        except BaseException:
            threads.shutdown(cancel_futures=True)
            raise
