"""One rank's scratch file of tensors, which threads read and write in the background, and the folder that it is in.

Reads and writes go around the page cache if the file system allows it (O_DIRECT), so that tensors on disk take no
memory. Elsewhere the pages are written through and dropped. The file is unlinked as soon as it is open, so nothing is
left behind however the process ends.
"""

from __future__ import annotations

import errno
import fcntl
import os
import tempfile
import warnings
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from plait.comm.device import page_memory
from plait.cost.memory_model import PAGE, human_bytes, padded
from plait.errors import HomeError

_IN_MEMORY = ("tmpfs", "ramfs")


def scratch_folder(given: str | Path | None) -> Path:
    """The folder given, or else TMPDIR, /var/tmp or the one of `tempfile`. HomeError if no file can be made in it."""
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
    """Warn if the folder lies in memory and not on a disk."""
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
    """The type of the file system that holds the folder; '' if the system does not tell."""
    try:
        lines = Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    where = folder.resolve()
    found = [(fields[1], fields[2]) for line in lines if len(fields := line.split()) > 2]
    around = [(mount, kind) for mount, kind in found if where.is_relative_to(mount)]
    return max(around, key=lambda one: len(one[0]), default=("", ""))[1]


_PIECE = 8 << 20
_NUM_THREADS = 4
_GROW = 64 << 20


class Transfer:
    """Reads or writes in flight."""

    def __init__(self, futures: list[Future[None]]) -> None:
        self._futures = futures

    def wait(self) -> None:
        """Wait until all are done. HomeError if the disk failed."""
        for future in self._futures:
            future.result()

    @property
    def done(self) -> bool:
        return all(future.done() for future in self._futures)


_NOTHING = Transfer([])


class DiskFile:
    """A file in `folder`, whose name has `label`. HomeError if it cannot be made or grown, or if the disk fails."""

    def __init__(self, folder: Path, label: str) -> None:
        self.path = folder / f"plait-{os.getpid()}-{id(self):x}-{label}"
        self._next = 0  # offset of the next place
        self._end = 0  # bytes that the file system has reserved
        try:
            self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            os.unlink(self.path)
        except OSError as error:
            raise HomeError(f"cannot make {self.path}: {error.strerror}; give another folder as scratch=") from None
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix=label)
        self._closing = weakref.finalize(self, os.close, self._fd)
        self.reserve(PAGE, "a first page")
        self.direct = self._try_direct()
        self.num_read = 0  # bytes so far
        self.num_written = 0

    def reserve(self, num_bytes: int, what: str) -> None:
        """Reserve room for that many more bytes of padded tensors. `what` names them in errors.

        Raises HomeError if the disk has no such room.
        """
        if num_bytes == 0:
            return
        try:
            os.posix_fallocate(self._fd, self._end, num_bytes)
        except OSError as error:
            os.ftruncate(self._fd, self._end)
            if error.errno not in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT):
                raise HomeError(f"cannot set room aside in {self.path}: {error.strerror}") from None
            about = os.fstatvfs(self._fd)
            raise HomeError(
                f"{self.path} needs {human_bytes(num_bytes)} more for {what}, and the disk has"
                f" {human_bytes(about.f_bavail * about.f_frsize)} free ({error.strerror}); free some, give a folder on"
                " another disk as scratch=, or split more with zero= and data="
            ) from None
        self._end += num_bytes

    def place(self, like: Tensor, what: str = "tensors") -> DiskPlace:
        """A place for a tensor of this shape, dtype and strides."""
        return DiskPlace(self, self.take(padded(like.nbytes), what), like)

    def take(self, num_bytes: int, what: str) -> int:
        """Take that many bytes, a multiple of a page, at the end of the file. Returns their offset."""
        if self._next + num_bytes > self._end:
            self.reserve(max(self._next + num_bytes - self._end, _GROW), what)
        self._next += num_bytes
        return self._next - num_bytes

    def read(self, offset: int, memory: Tensor, after: Transfer) -> Transfer:
        """Fill page memory from the file, once `after` is done."""
        self.num_read += memory.numel()
        return self._start(os.preadv, "read", offset, memory, after)

    def write(self, offset: int, memory: Tensor, after: Transfer) -> Transfer:
        """Write page memory to the file, once `after` is done."""
        self.num_written += memory.numel()
        return self._start(os.pwritev, "write", offset, memory, after)

    def submit(self, call: Callable[[], None]) -> Transfer:
        """Run a function on one of the threads."""
        return Transfer([self._threads.submit(call)])

    def close(self) -> None:
        """Wait for the transfers in flight and give the room back."""
        self._threads.shutdown(wait=True, cancel_futures=True)
        self._closing()

    def _start(self, call: Callable[..., int], verb: str, offset: int, memory: Tensor, after: Transfer) -> Transfer:
        pieces = range(0, memory.numel(), _PIECE)
        return Transfer([self._threads.submit(self._piece, call, verb, offset, memory, at, after) for at in pieces])

    def _piece(
        self, call: Callable[..., int], verb: str, offset: int, memory: Tensor, at: int, after: Transfer
    ) -> None:
        after.wait()  # it was queued before this one, so it has a thread or is done: no deadlock
        view = memory.numpy().data[at : at + _PIECE]
        position = offset + at
        try:
            while view:
                num = call(self._fd, [view], position)
                if num == 0:
                    raise OSError(errno.EIO, "the file is shorter than what was written to it")
                view, position = view[num:], position + num
            if not self.direct:
                self._drop_pages(verb, offset + at, position)
        except OSError as error:
            raise HomeError(
                f"cannot {verb} {self.path} at byte {position}: {error.strerror}; what the plan keeps there is lost, so"
                " the run cannot go on. Checkpoints are not touched: see to the disk, or give another folder as"
                " scratch=, and go on from the last one"
            ) from None

    def _drop_pages(self, verb: str, start: int, end: int) -> None:
        if verb == "write":
            os.fdatasync(self._fd)  # only clean pages can be dropped
        os.posix_fadvise(self._fd, start, end - start, os.POSIX_FADV_DONTNEED)

    def _try_direct(self) -> bool:
        """Bypass the page cache, if that works here."""
        flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
        try:
            fcntl.fcntl(self._fd, fcntl.F_SETFL, flags | os.O_DIRECT)
            os.pwritev(self._fd, [page_memory(PAGE).zero_().numpy().data], 0)
        except (OSError, AttributeError):
            fcntl.fcntl(self._fd, fcntl.F_SETFL, flags)
            return False
        return True


class DryRunFile(DiskFile):
    """A file that is never written, for a dry run on tensors without memory."""

    def __init__(self) -> None:
        self._next = self._end = self.num_read = self.num_written = 0

    def submit(self, call: Callable[[], None]) -> Transfer:
        return _NOTHING

    def close(self) -> None:
        pass

    def _start(self, call: Callable[..., int], verb: str, offset: int, memory: Tensor, after: Transfer) -> Transfer:
        return _NOTHING

    def reserve(self, num_bytes: int, what: str) -> None:
        self._end += num_bytes


class DiskPlace:
    """The place of one tensor in a file. Its reads and writes happen in the order of the calls."""

    def __init__(self, file: DiskFile, offset: int, like: Tensor) -> None:
        self._file = file
        self._offset = offset
        self._written = _NOTHING
        self._read = _NOTHING
        self.form = torch.empty_like(like, device="meta", requires_grad=False)  # as dense as the tensor can be
        self.num_bytes = padded(like.nbytes)

    def fits(self, tensor: Tensor) -> bool:
        """Whether the tensor has the shape, dtype and strides that this place is for."""
        form = self.form
        return (tensor.shape, tensor.dtype, tensor.stride()) == (form.shape, form.dtype, form.stride())

    def view(self, memory: Tensor) -> Tensor:
        """A view of page memory of `num_bytes` as the tensor."""
        form = self.form
        return memory[: form.nbytes].view(form.dtype).as_strided(form.shape, form.stride())

    def read(self, memory: Tensor) -> Transfer:
        """Start to read the tensor into page memory of `num_bytes`."""
        self._read = self._file.read(self._offset, memory, self._written)
        return self._read

    def write(self, memory: Tensor, after: Transfer | None = None) -> Transfer:
        """Start to write the tensor from page memory of `num_bytes`, once `after` is done. The memory must not change
        until the transfer is done."""
        self._written = self._file.write(self._offset, memory, _all(self._read, self._written, after or _NOTHING))
        return self._written

    def get(self) -> Tensor:
        """Read the tensor into new memory."""
        memory = page_memory(self.num_bytes)
        self.read(memory).wait()
        return self.view(memory)

    def put(self, tensor: Tensor) -> Transfer:
        """Start to write a copy of the tensor."""
        memory = page_memory(self.num_bytes)
        self.view(memory).copy_(tensor)
        return self.write(memory)


def _all(*transfers: Transfer) -> Transfer:
    return Transfer([future for one in transfers for future in one._futures if not future.done() or future.exception()])
