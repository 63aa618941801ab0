"""Writes checkpoints. A run has a folder with its last few checkpoints; in each, every rank writes its part, and
rank 0 the manifest.

    runs/gpt/checkpoints/step-00000200/{part-00000-5f31c2d8.safetensors, part-00001-5f31c2d8.safetensors, manifest.json}

The manifest is written last and atomically: a save that is killed leaves files that no manifest names, which the next
save removes. Each element of a tensor is written by one rank; every rank computes alone which, and no collective is
involved. On several machines, all must see the same folder.

A save in the background runs alone. Its error is raised by the next save, step or close.
"""

from __future__ import annotations

import atexit
import bisect
import contextlib
import functools
import json
import re
import sys
import threading
import time
import uuid
import weakref
import zlib
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from plait.comm.device import Event, is_host, page_memory
from plait.comm.protocol import World
from plait.compile.ir.dtypes import torch_name
from plait.cost.memory_model import padded
from plait.engine.checkpoint.barrier import Barrier
from plait.engine.checkpoint.checkpoint_folders import checkpoints, own_folders
from plait.engine.checkpoint.json_values import encode
from plait.engine.checkpoint.local_shards import LocalShard, WrittenPiece, pieces
from plait.engine.checkpoint.manifest import BLOCK, NAME, FileEntry, Manifest, saved_at
from plait.engine.checkpoint.safetensor import Entry, check_dtype, write_header
from plait.engine.checkpoint.storage import Folder, Location, NewFile, folder_of
from plait.errors import CheckpointError


class Saver:
    """The background saves of one trainer. It keeps the host memory that tensors are copied into, for the next save."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._done = threading.Event()
        self._done.set()
        self._error: CheckpointError | None = None
        self._barrier: Barrier | None = None
        self._memory: list[Tensor] = []
        atexit.register(_report, weakref.ref(self))

    def memory(self, index: int, num_bytes: int, pinned: bool) -> Tensor:
        """Page memory for file `index` of a save; reused from earlier saves if it is large enough."""
        while len(self._memory) <= index:
            self._memory.append(page_memory(0))
        if self._memory[index].numel() < num_bytes:
            self._memory[index] = page_memory(0)  # free the old memory first
            self._memory[index] = page_memory(num_bytes, pinned)
        return self._memory[index]

    def start(self, barrier: Barrier, save: Callable[[], None], after: Callable[[], None]) -> None:
        """Run `save`, and `after` if it succeeds, in a thread that the process waits for before it exits."""
        if self._thread is not None:
            self._thread.join()
        done = threading.Event()

        def run() -> None:
            try:
                save()
            except CheckpointError as error:
                self._error = error
            except Exception as error:
                self._error = CheckpointError(f"a save failed: {type(error).__name__}: {error}")
            finally:
                failed = self._error is not None
                done.set()
            if not failed:
                after()

        self._barrier, self._done = barrier, done
        self._thread = threading.Thread(target=run, name="plait saver")
        self._thread.start()

    def wait(self) -> None:
        """Wait for the save in flight. Raises CheckpointError, which names the file, if it failed."""
        if not self._done.is_set():
            barrier = self._barrier
            with nullcontext() if barrier is None else barrier.waiting():
                self._done.wait()
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def check(self, step: int) -> None:
        """Raise the error of a failed save. Called before every step; all ranks raise at the same step."""
        if self._error is not None and self._barrier is not None and self._barrier.raise_together(step):
            self.wait()


def _report(reference: weakref.ref[Saver]) -> None:
    """Print the error of the last save at the end of a process that has not asked for it."""
    saver = reference()
    if saver is not None and saver._error is not None:
        print(f"plait: {saver._error}", file=sys.stderr)


KEEP = 2
_OURS = re.compile(r"\.?(part|record)-\d{5}-.*|\.manifest\.json\.aside")


@dataclass(frozen=True)
class State:
    """The state that one rank saves.

    tensors  this rank's parts, by name
    values   values that are equal on all ranks, with the step as values["step"]
    own      values that only this rank has, by name

    Values are JSON values, and tuples, bytes and small tensors.
    """

    tensors: dict[str, LocalShard]
    values: dict[str, Any]
    own: dict[str, object] = field(default_factory=dict)


def save(
    path: Location, state: State, *, world: World, plan: str, keep: int = KEEP, saver: Saver | None = None,
    wait: bool = True,
) -> Folder:  # fmt: skip
    """Write `state` as the newest checkpoint in the folder or URL `path`, and keep only the last `keep` checkpoints
    there.

    Without `wait` it returns once the tensors are copied, and writes in the background; the saver's `wait` and `check`
    raise its errors. With `wait`, or if some tensors are outside memory, it needs memory for a few blocks only. All
    ranks must call it. Raises CheckpointError, which names the file; earlier checkpoints stay as they were.
    """
    if keep < 1:
        raise CheckpointError(f"keep={keep}: at least one checkpoint is kept")
    saver = saver or Saver()
    saver.wait()
    barrier = Barrier(world)
    final = folder_of(path).child(f"step-{int(state.values['step']):08d}")
    job = _Save(folder_of(path), final, state, world, plan, keep, barrier)
    behind = not wait and all(image.in_memory for image in job.images)
    memories: list[torch.Tensor | None] = [*job.copied(saver)] if behind else [None] * len(job.images)
    saver.start(barrier, functools.partial(job.run, memories, 1 if behind else 2), job.remove_old)
    if not behind:
        saver.wait()
    return final


class _Save:
    """One rank's side of one save."""

    def __init__(
        self, base: Folder, final: Folder, state: State, world: World, plan: str, keep: int, barrier: Barrier
    ) -> None:
        self._base, self._final, self._world, self._plan, self._keep = base, final, world, plan, keep
        self._barrier = barrier
        self._step = int(state.values["step"])
        self._old: list[Folder] = []
        self._unneeded: list[str] = []
        self._copies_done: Event | None = None  # set once the copies to host memory are ordered
        small: dict[str, torch.Tensor] = {}
        self._values = encode(state.values, "values", small.__setitem__)
        own = {name: encode(value, name, small.__setitem__) for name, value in state.own.items()}
        held = dict(state.tensors)
        if world.rank == 0:
            held |= {name: LocalShard.whole(tensor) for name, tensor in small.items()}
        layers: list[list[WrittenPiece]] = []
        for name, shard in held.items():
            for index, members in enumerate(pieces(name, shard)):
                layers.extend([] for _ in range(index + 1 - len(layers)))
                layers[index] += members
        self.images = [Image(layer) for layer in layers]
        shapes = {}
        for name, shard in held.items():
            if shard.data is not None:
                check_dtype(name, torch_name(shard.data.dtype))
                shapes[name] = [list(shard.shape), torch_name(shard.data.dtype)]
        self._record = {"tensors": shapes, "own": own}

    def copied(self, saver: Saver) -> list[torch.Tensor]:
        """Copy the files' content into the saver's memory."""
        pinned = not is_host(self._world.device)
        memories = []
        for index, image in enumerate(self.images):
            memories.append(saver.memory(index, image.size, pinned))
            image.copy_into(memories[-1])
        self._copies_done = Event(self._world.device)
        return memories

    def run(self, memories: list[torch.Tensor | None], num_threads: int) -> None:
        """Write the files, with barriers of the ranks at the beginning and at the end."""
        written: list[str] = []
        try:
            name = self._barrier.on_first_rank("start", self._make_room)
            self._barrier.on_all_ranks("write", lambda: self._write(name, memories, num_threads, written))
            self._barrier.on_first_rank("finish", lambda: self._finish(name))
        except CheckpointError:
            with contextlib.suppress(OSError):  # the folder is gone, as the error says
                for file in written:
                    self._final.remove(file)
            raise
        finally:
            self._barrier.leave()

    def _make_room(self) -> str:
        """On rank 0: make the folder and remove what killed saves have left. Returns the name of this save."""
        try:
            clean(self._base)
            self._final.make()
        except OSError as error:
            raise self._failure(str(error.filename or self._final), error) from None
        return uuid.uuid4().hex[:8]

    def _write(self, name: str, memories: list[torch.Tensor | None], num_threads: int, written: list[str]) -> None:
        """Write this rank's files, and a record of them for rank 0."""
        if self._copies_done is not None:
            self._copies_done.synchronize()
        rank = f"{self._world.rank:05d}"
        entries = {}
        for index, (image, memory) in enumerate(zip(self.images, memories, strict=True)):
            layer = f"-{index}" if index else ""
            file = f"part-{rank}{layer}-{name}.safetensors"
            written.append(file)
            new = None
            try:
                new = self._final.create(file, image.size)
                entries[file] = image.write(new, memory, num_threads).plain()
            except OSError as error:
                with contextlib.suppress(OSError):
                    if new is not None:
                        new.abandon()
                raise self._failure(f"{self._final}/{file}", error) from None
        record = f"record-{rank}-{name}.json"
        written.append(record)
        try:
            self._final.put(record, [json.dumps(self._record | {"files": entries}).encode()])
        except OSError as error:
            raise self._failure(f"{self._final}/{record}", error) from None

    def _finish(self, name: str) -> str:
        """On rank 0: join the records to the manifest, and remove checkpoints that are no longer needed."""
        records = [f"record-{rank:05d}-{name}.json" for rank in range(self._world.mesh.size)]
        tensors: dict[str, Any] = {}
        files: dict[str, FileEntry] = {}
        own: dict[str, object] = {}
        try:
            for record in records:
                found = json.loads(self._final.read(record))
                tensors = found["tensors"] | tensors
                own = found["own"] | own
                files |= {file: FileEntry.of(entry) for file, entry in found["files"].items()}
            shapes = {tensor: (tuple(shape), dtype) for tensor, (shape, dtype) in tensors.items()}
            values = {"common": self._values, "own": own}
            Manifest(self._step, self._plan, time.time(), shapes, files, values).write(self._final)
        except OSError as error:
            raise self._failure(f"{self._final}/{NAME}", error) from None
        with contextlib.suppress(OSError):  # what cannot be removed now is left to the next save
            for record in records:
                self._final.remove(record)
            self._unneeded = _unneeded(self._final)  # of an earlier save of this step
            others = [one for one in checkpoints(self._base) if one.name != self._final.name and not one.is_link()]
            others.sort(key=lambda folder: saved_at(folder) or 0.0)  # damaged ones are removed first
            for old in others[: max(len(others) + 1 - self._keep, 0)]:
                old.remove(NAME)  # no longer a checkpoint
                self._old.append(old)
        return ""

    def remove_old(self) -> None:
        """Remove files that no manifest names, which takes long on some file systems."""
        if self._world.rank != 0:
            return
        with contextlib.suppress(OSError):
            for file in self._unneeded:
                self._final.remove(file)
            for old in self._old:
                old.remove_all()

    def _failure(self, file: str, error: OSError) -> CheckpointError:
        return CheckpointError(
            f"the checkpoint {self._final} was not written: {file}: {error.strerror or error}; earlier ones are as they"
            " were"
        )


def clean(base: Folder) -> None:
    """Remove what interrupted saves have left. Must not be called during a save into `base`."""
    for folder in own_folders(base):
        _sweep(folder)


def _sweep(folder: Folder) -> None:
    """Remove the files of interrupted saves, and the folder if it has no others."""
    for name in _unneeded(folder):
        folder.remove(name)
    if not folder.names():
        folder.remove_all()


def _unneeded(folder: Folder) -> list[str]:
    """The files of saves that the manifest does not name."""
    names = folder.names()
    needed: set[str] = set()
    if NAME in names:
        try:
            needed = {NAME, *Manifest.read(folder).files}
        except CheckpointError:  # damaged: the files are kept for inspection
            return []
    return [name for name in names if name not in needed and _OURS.fullmatch(name)]


class Image:
    """The content of a safetensors file that holds the given pieces."""

    def __init__(self, pieces: Sequence[WrittenPiece]) -> None:
        self._pieces = sorted(pieces, key=lambda piece: -piece.dtype.itemsize)
        self.in_memory = all(piece.in_memory for piece in pieces)
        self._header, self.entries = write_header(
            [(p.name, torch_name(p.dtype), p.block.shape, p.block.start) for p in self._pieces], parts=True
        )
        last = self.entries[-1] if self.entries else Entry("", "uint8", (0,), (0,), len(self._header))
        self.size = last.offset + last.num_bytes
        self._recent: tuple[WrittenPiece, Tensor] | None = None

    @property
    def num_blocks(self) -> int:
        """The number of blocks with a checksum of their own."""
        return -(-self.size // BLOCK)

    def copy_into(self, memory: Tensor) -> None:
        """Copy the whole file into page memory. Copies from a GPU are only ordered on its stream."""
        with torch.no_grad():
            memory[: len(self._header)] = torch.frombuffer(bytearray(self._header), dtype=torch.uint8)
            for piece, entry in zip(self._pieces, self.entries, strict=True):
                place = memory[entry.offset : entry.offset + entry.num_bytes]
                place.view(piece.dtype).view(entry.shape).copy_(piece.take(), non_blocking=True)

    def fill(self, start: int, memory: Tensor) -> None:
        """Copy the bytes of the file from `start` on into the memory."""
        stop = start + memory.numel()
        if start < len(self._header):
            some = self._header[start:stop]
            memory[: len(some)] = torch.frombuffer(bytearray(some), dtype=torch.uint8)
        first = max(bisect.bisect_right(self.entries, start, key=lambda entry: entry.offset) - 1, 0)
        for piece, entry in zip(self._pieces[first:], self.entries[first:], strict=True):
            if entry.offset >= stop:
                break
            low, high = max(start, entry.offset), min(stop, entry.offset + entry.num_bytes)
            if low < high:
                memory[low - start : high - start] = self._bytes(piece)[low - entry.offset : high - entry.offset]

    def _bytes(self, piece: WrittenPiece) -> Tensor:
        """The piece's bytes, contiguous. They are kept, because the next block may hold more of the piece."""
        if self._recent is None or self._recent[0] is not piece:
            with torch.no_grad():
                self._recent = (piece, piece.take().cpu().contiguous().view(-1).view(torch.uint8))
        return self._recent[1]

    def write(self, file: NewFile, memory: Tensor | None, num_threads: int) -> FileEntry:
        """Write the file, from `memory` that it was copied into, or block by block. Returns its entry for the
        manifest."""
        crcs = [0] * self.num_blocks
        indices = iter(range(self.num_blocks))
        lock = threading.Lock()
        errors: list[BaseException] = []

        def work() -> None:
            own = page_memory(BLOCK) if memory is None else None
            while not errors:
                try:
                    with lock:
                        index = next(indices, None)
                        if index is None:
                            return
                        start, stop = index * BLOCK, min(index * BLOCK + BLOCK, self.size)
                        block = memory[start : start + BLOCK] if memory is not None else own
                        assert block is not None
                        if memory is None:
                            self.fill(start, block[: stop - start])
                    view = block.numpy().data
                    crcs[index] = zlib.crc32(view[: stop - start])
                    file.write(start, view[: padded(stop - start)])
                except BaseException as error:  # raised below, in the calling thread
                    errors.append(error)

        helpers = [threading.Thread(target=work) for _ in range(min(num_threads, self.num_blocks) - 1)]
        for helper in helpers if file.parallel else []:
            helper.start()
        work()
        for helper in helpers if file.parallel else []:
            helper.join()
        self._recent = None
        if errors:
            raise errors[0]
        file.finish()
        return FileEntry(self.size, tuple(crcs), {e.name: (e.start, e.shape, e.offset) for e in self.entries})
