"""Memory that processes of one host share: a header of int64 words, then an arena for tensors.

It is an anonymous memory file, which peers open through /proc: there is no name that could be left behind, and the size
of /dev/shm does not matter. Pages cost nothing until they are touched; the file grows when the arena is full.

Words are read and written as whole aligned 64-bit values, and x86-64 makes stores visible in order. A word that says
that data is ready can therefore simply be stored after the data.
"""

from __future__ import annotations

import mmap
import os

import torch

_ALIGN = 64
_MAX_VIEWS = 512

# Processes of one host write dtypes into shared memory as numbers.
DTYPES = (
    torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.complex64, torch.complex128,
)  # fmt: skip
DTYPE_CODES = {dtype: code for code, dtype in enumerate(DTYPES)}


class Segment:
    """One rank's shared memory. Its owner writes it; peers map the same file in a Segment of their own and read it."""

    def __init__(self, fd: int, num_words: int) -> None:
        self.fd = fd
        self._num_words = num_words
        self.arena_start = -(-num_words * 8 // mmap.PAGESIZE) * mmap.PAGESIZE
        self._views: dict[tuple[int, int, torch.dtype], torch.Tensor] = {}
        self._map()

    @classmethod
    def create(cls, num_words: int, num_bytes: int) -> Segment:
        fd = os.memfd_create("plait", os.MFD_CLOEXEC)
        os.ftruncate(fd, num_words * 8 + mmap.PAGESIZE + num_bytes)
        return cls(fd, num_words)

    @classmethod
    def open(cls, pid: int, fd: int, num_words: int) -> Segment:
        """The segment of another process. Raises OSError if it cannot be reached."""
        return cls(os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC), num_words)

    def _map(self) -> None:
        # An older mapping lives as long as tensors are in it; it shows the same pages.
        self.size = os.fstat(self.fd).st_size
        memory = mmap.mmap(self.fd, self.size)
        self.words = memoryview(memory)[: self._num_words * 8].cast("q")
        self._bytes = torch.frombuffer(memory, dtype=torch.uint8)
        self._views.clear()

    def grow(self, size: int) -> None:
        """Enlarge the file. Peers map it again when they see an offset beyond what they have mapped."""
        os.ftruncate(self.fd, size)
        self._map()

    def view(self, offset: int, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
        """The flat tensor at an offset in bytes."""
        key = (offset, num_elements, dtype)
        view = self._views.get(key)
        if view is None:
            end = offset + num_elements * dtype.itemsize
            if end > self.size:
                self._map()
            if len(self._views) >= _MAX_VIEWS:
                self._views.clear()
            view = self._views[key] = self._bytes[offset:end].view(dtype)
        return view

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class Arena:
    """The allocator of a segment's bytes. Allocation is first fit, so that the lowest pages are reused."""

    def __init__(self, start: int, end: int) -> None:
        self._free = [(start, end)]
        self._end = end

    def take(self, num_bytes: int) -> int | None:
        """The offset of a free block, which is then in use; None if there is none."""
        need = _rounded(num_bytes)
        for i, (start, end) in enumerate(self._free):
            if end - start >= need:
                if end - start == need:
                    del self._free[i]
                else:
                    self._free[i] = (start + need, end)
                return start
        return None

    def give(self, offset: int, num_bytes: int) -> None:
        """Free a block that `take` returned."""
        start, end = offset, offset + _rounded(num_bytes)
        free = self._free
        i = 0
        while i < len(free) and free[i][0] < start:
            i += 1
        if i < len(free) and free[i][0] == end:
            end = free.pop(i)[1]
        if i > 0 and free[i - 1][1] == start:
            start = free.pop(i - 1)[0]
            i -= 1
        free.insert(i, (start, end))

    def extend(self, end: int) -> None:
        old, self._end = self._end, end
        if self._free and self._free[-1][1] == old:
            self._free[-1] = (self._free[-1][0], end)
        else:
            self._free.append((old, end))


def _rounded(num_bytes: int) -> int:
    return -(-max(num_bytes, 1) // _ALIGN) * _ALIGN
