"""Checking the files of a checkpoint against its manifest; needs no torch."""

from __future__ import annotations

import os
import threading
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from plait.errors import CheckpointError
from plait.run.manifest import BLOCK, FileEntry, Manifest
from plait.run.storage import Folder

T = TypeVar("T")
_AT_ONCE = 16 * BLOCK


def damages(folder: Folder) -> list[str]:
    """What is wrong with each file of a checkpoint, after a look at every byte of it; needs no model."""
    try:
        manifest = Manifest.read(folder)
    except CheckpointError as error:
        return [str(error)]
    found = []
    for name, entry in manifest.files.items():
        try:
            _check_file(folder, name, entry)
            _check_all(folder, name, entry)
        except CheckpointError as error:
            found.append(str(error))
    return found


def check_files(folder: Folder) -> Manifest:
    """The manifest, after a look at which files there are; CheckpointError names one that is missing or cut short."""
    manifest = Manifest.read(folder)
    for name, entry in manifest.files.items():
        _check_file(folder, name, entry)
    return manifest


def _check_file(folder: Folder, name: str, entry: FileEntry) -> None:
    size = folder.size(name)
    if size == entry.bytes:
        return
    what = "is missing" if size is None else f"has {size} bytes, not {entry.bytes}"
    raise CheckpointError(f"the checkpoint {folder} is damaged: {name} (crc32 {entry.crc32:08x}) {what}")


def read_checked(folder: Folder, name: str, entry: FileEntry | None, start: int, memory: memoryview) -> None:
    """Fill the memory with a file's bytes from the beginning of a block on, after a look at the checksum of each block.

    The memory holds whole blocks, or all up to the end of the file. Without an entry there are no checksums.
    """
    try:
        num = folder.read_into(name, start, memory)
    except OSError as error:
        raise CheckpointError(f"cannot read {folder}/{name}: {error.strerror or error}") from None
    if num != len(memory):
        raise CheckpointError(f"{folder}/{name} ends at byte {start + num}, before what is needed")
    for at in range(0, len(memory) if entry is not None else 0, BLOCK):
        assert entry is not None
        found, expected = zlib.crc32(memory[at : at + BLOCK]), entry.blocks[(start + at) // BLOCK]
        if found != expected:
            stop = min(start + at + BLOCK, entry.bytes)
            raise CheckpointError(
                f"the checkpoint {folder} is damaged: {name} (crc32 {entry.crc32:08x}) was altered: its bytes from"
                f" {start + at} to {stop} have crc32 {found:08x}, not {expected:08x}"
            )


def _check_all(folder: Folder, name: str, entry: FileEntry) -> None:
    own = threading.local()

    def check(start: int) -> None:
        if not hasattr(own, "memory"):
            own.memory = memoryview(bytearray(_AT_ONCE))
        read_checked(folder, name, entry, start, own.memory[: min(_AT_ONCE, entry.bytes - start)])

    in_threads(list(range(0, entry.bytes, _AT_ONCE)), check)


def in_threads(items: list[T], work: Callable[[T], None]) -> None:
    """Do the work on every item, a few at a time; raises the error of the first of those that failed."""
    num = min(4, os.cpu_count() or 1, len(items))
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
