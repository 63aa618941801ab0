"""Folders that checkpoints are kept in: local ones, and any that fsspec knows by a URL such as s3://bucket/run.

What is put under a name appears there whole or not at all; large files are written block by block, and count only once
something else names them. A name is that of a file in the folder: no path, and no link unless links are asked for.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shutil
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

from plait.errors import CheckpointError

Location = str | Path | os.PathLike[str]

_PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,254}")
_NEW = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
_LARGEST_TEXT = 1 << 30  # bytes of a file that is read whole


class NewFile(Protocol):
    """A file that is being written."""

    parallel: bool  # whether blocks may come from several threads, in any order

    def write(self, offset: int, block: memoryview) -> None:
        """Write a block; all but the last are whole pages, and memory behind the last one may be read up to a page."""

    def finish(self) -> None:
        """Have everything on the disk, of the size that was said."""

    def abandon(self) -> None:
        """Remove it."""


class Folder(Protocol):
    """A folder. OSError where the file system fails; the caller says what that was for."""

    name: str

    def __str__(self) -> str: ...

    def child(self, name: str) -> Folder: ...

    def names(self) -> list[str]:
        """What it holds, sorted; nothing where it does not exist."""

    def is_link(self) -> bool:
        """Whether it only leads to a folder, which is then nobody's to change from here."""

    def make(self) -> None:
        """Make it if it is not there; a link that is there in its place goes."""

    def size(self, name: str) -> int | None:
        """Bytes of a file; None where there is none."""

    def read(self, name: str) -> bytes: ...

    def read_into(self, name: str, offset: int, memory: memoryview) -> int:
        """Fill the memory with the file's bytes from `offset` on; returns how many there were."""

    def put(self, name: str, data: Iterable[bytes | memoryview]) -> None:
        """Write a file whole, from its parts in order; it replaces one of that name."""

    def create(self, name: str, size: int) -> NewFile: ...

    def remove(self, name: str) -> None: ...

    def remove_all(self) -> None:
        """Remove the folder with all that is in it."""


def is_plain_name(name: str) -> bool:
    """Whether the text names a file of a folder, and cannot lead out of it."""
    return _PLAIN_NAME.fullmatch(name) is not None


def folder_of(location: Location, *, links: bool = False) -> Folder:
    """The folder at a path or URL, whether or not it exists; with `links`, files of it that are links are followed."""
    text = os.fspath(location)
    if "://" not in text:
        return LocalFolder(Path(text), links)
    if text.startswith("file://"):
        return LocalFolder(Path(text.removeprefix("file://")), links)
    try:
        import fsspec
    except ImportError:
        raise CheckpointError(f"{text} needs fsspec: pip install 'plait[fsspec]', or give a local folder") from None
    try:
        system, path = fsspec.core.url_to_fs(text)
    except (ImportError, ValueError) as error:
        raise CheckpointError(f"{text} cannot be used: {error}") from None
    return RemoteFolder(system, path.rstrip("/"), text.rstrip("/"))


class LocalFolder:
    """`inside` is one that another folder holds: nothing is changed through it where it is a link."""

    def __init__(self, path: Path, links: bool = False, inside: bool = False) -> None:
        self.path = path
        self.name = path.name
        self._links = links
        self._inside = inside

    def __str__(self) -> str:
        return str(self.path)

    def child(self, name: str) -> LocalFolder:
        return LocalFolder(self.path / name, self._links, inside=True)

    def names(self) -> list[str]:
        return sorted(os.listdir(self.path)) if self.path.is_dir() else []

    def is_link(self) -> bool:
        return self.path.is_symlink()

    def make(self) -> None:
        if self._inside and self.is_link():
            self.path.unlink()
        self.path.mkdir(parents=True, exist_ok=True)
        _sync_folder(self.path.parent)

    def size(self, name: str) -> int | None:
        try:
            found = os.stat(self.path / name, follow_symlinks=self._links)
        except (FileNotFoundError, NotADirectoryError):
            return None
        return found.st_size if stat.S_ISREG(found.st_mode) else None

    def read(self, name: str) -> bytes:
        with open(self._opened(name), "rb") as file:
            if os.fstat(file.fileno()).st_size > _LARGEST_TEXT:
                raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(self.path / name))
            return file.read()

    def read_into(self, name: str, offset: int, memory: memoryview) -> int:
        done = 0
        with open(self._opened(name), "rb", buffering=0) as file:
            while done < len(memory) and (num := os.preadv(file.fileno(), [memory[done:]], offset + done)):
                done += num
        return done

    def put(self, name: str, data: Iterable[bytes | memoryview]) -> None:
        aside = f".{name}.aside"
        with self._held() as here:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(aside, dir_fd=here)
            try:
                with open(os.open(aside, _NEW | os.O_EXCL, 0o666, dir_fd=here), "wb") as file:
                    for part in data:
                        file.write(part)
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(aside, name, src_dir_fd=here, dst_dir_fd=here)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(aside, dir_fd=here)
                raise
            os.fsync(here)

    def create(self, name: str, size: int) -> NewFile:
        with self._held() as here:
            return _LocalFile(self.path / name, os.open(name, _NEW | os.O_TRUNC, 0o644, dir_fd=here), size)

    def remove(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError), self._held() as here:
            os.unlink(name, dir_fd=here)

    def remove_all(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)  # which leaves a link alone

    def _opened(self, name: str) -> int:
        """A descriptor of a file; no other kind is waited for or read."""
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if self._links else os.O_NOFOLLOW)
        found = os.open(self.path / name, flags)
        if not stat.S_ISREG(os.fstat(found).st_mode):
            os.close(found)
            raise OSError(errno.EINVAL, "it is no file", str(self.path / name))
        return found

    @contextlib.contextmanager
    def _held(self) -> Iterator[int]:
        """A descriptor of the folder, so that names mean files of it whatever becomes of its path meanwhile."""
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | (os.O_NOFOLLOW if self._inside else 0)
        here = os.open(self.path, flags)
        try:
            yield here
        finally:
            os.close(here)


class _LocalFile:
    """Written around the page cache where the file system allows it, which is about three times as fast."""

    parallel = True

    def __init__(self, path: Path, fd: int, size: int) -> None:
        self._path = path
        self._size = size
        self._fd = fd
        self._direct = self._set_direct(True)

    def write(self, offset: int, block: memoryview) -> None:
        end = offset + len(block)
        if not self._direct:
            block = block[: self._size - offset]
        while block:
            try:
                num = os.pwrite(self._fd, block, offset)
            except OSError as error:
                # A file system that has no direct writes, or the rest of a page after a write that was cut short.
                if error.errno != errno.EINVAL or not self._direct:
                    raise
                self._direct = not self._set_direct(False)
                block = block[: min(end, self._size) - offset]
                continue
            block, offset = block[num:], offset + num

    def finish(self) -> None:
        try:
            os.ftruncate(self._fd, self._size)
            os.fsync(self._fd)
        finally:
            os.close(self._fd)

    def abandon(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self._fd)
        self._path.unlink(missing_ok=True)

    def _set_direct(self, on: bool) -> bool:
        """Whether it could be set."""
        flag = getattr(os, "O_DIRECT", 0)
        flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
        try:
            fcntl.fcntl(self._fd, fcntl.F_SETFL, flags | flag if on else flags & ~flag)
        except OSError:
            return False
        return bool(flag)


class RemoteFolder:
    """Of a file system of fsspec. A file appears when it is finished, as object stores have it."""

    def __init__(self, system: Any, path: str, text: str) -> None:
        self._system = system
        self._path = path
        self._text = text
        self.name = path.rpartition("/")[2]

    def __str__(self) -> str:
        return self._text

    def child(self, name: str) -> RemoteFolder:
        return RemoteFolder(self._system, f"{self._path}/{name}", f"{self._text}/{name}")

    def names(self) -> list[str]:
        self._system.invalidate_cache()
        try:
            found = self._system.ls(self._path, detail=False)
        except FileNotFoundError:
            return []
        return sorted({name.rstrip("/").rpartition("/")[2] for name in found} - {""})

    def is_link(self) -> bool:
        return False

    def make(self) -> None:
        self._system.makedirs(self._path, exist_ok=True)

    def size(self, name: str) -> int | None:
        try:
            return int(self._system.size(f"{self._path}/{name}"))
        except (FileNotFoundError, TypeError):
            return None

    def read(self, name: str) -> bytes:
        if (self.size(name) or 0) > _LARGEST_TEXT:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), f"{self._text}/{name}")
        found: bytes = self._system.cat_file(f"{self._path}/{name}")
        return found

    def read_into(self, name: str, offset: int, memory: memoryview) -> int:
        found = self._system.cat_file(f"{self._path}/{name}", start=offset, end=offset + len(memory))
        memory[: len(found)] = found
        return len(found)

    def put(self, name: str, data: Iterable[bytes | memoryview]) -> None:
        file = _RemoteFile(self._system, f"{self._path}/{name}")
        try:
            for part in data:
                file.append(part)
            file.finish()
        except BaseException:
            file.abandon()
            raise

    def create(self, name: str, size: int) -> NewFile:
        return _RemoteFile(self._system, f"{self._path}/{name}", size)

    def remove(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._system.rm_file(f"{self._path}/{name}")

    def remove_all(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._system.rm(self._path, recursive=True)


class _RemoteFile:
    """Written from its beginning to its end."""

    parallel = False

    def __init__(self, system: Any, path: str, size: int = 0) -> None:
        self._system, self._path, self._size = system, path, size
        self._file = system.open(path, "wb")

    def write(self, offset: int, block: memoryview) -> None:
        self.append(block[: self._size - offset])

    def append(self, data: bytes | memoryview) -> None:
        self._file.write(data)

    def finish(self) -> None:
        self._file.close()

    def abandon(self) -> None:
        with contextlib.suppress(Exception):
            self._file.discard()
        with contextlib.suppress(Exception):
            self._system.rm_file(self._path)


def _sync_folder(path: Path) -> None:
    """Have the names in a folder on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
