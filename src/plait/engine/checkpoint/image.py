"""The content of a file of tensors: copied into host memory at once, or made block by block while it is written."""

from __future__ import annotations

import bisect
import threading
import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

from plait.backends.eager.page_memory import page_memory
from plait.compile.ir.dtypes import torch_name
from plait.cost.memory_model import padded
from plait.engine.checkpoint.holding import WrittenPiece
from plait.engine.checkpoint.manifest import BLOCK, FileEntry
from plait.engine.checkpoint.safetensor import Entry, write_header
from plait.engine.checkpoint.storage import NewFile


class Image:
    """The content of a safetensors file that holds the given pieces."""

    def __init__(self, pieces: Sequence[WrittenPiece]) -> None:
        self._pieces = sorted(pieces, key=lambda piece: -piece.dtype.itemsize)
        self.in_memory = all(piece.in_memory for piece in pieces)
        self._header, self.entries = write_header(
            [(p.name, torch_name(p.dtype), p.box.shape, p.box.start) for p in self._pieces], parts=True
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
