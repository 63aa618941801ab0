"""Checks the files of a checkpoint against its manifest. Needs no torch."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from plait.engine.checkpoint.manifest import BLOCK, FileEntry, Manifest
from plait.engine.checkpoint.storage import Folder
from plait.errors import CheckpointError

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
    what = "is missing" if size is None else f"has {size} bytes, not {entry.bytes}"
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
