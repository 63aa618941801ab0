"""Folders for checkpoints: local ones, and any that fsspec knows by a URL such as s3://bucket/run.

`put` writes a file atomically. Large files are written block by block with `create`, and count only once another file
names them. A name is that of a file in the folder: not a path, and not a link unless links are allowed.
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
    """A file that is being written. `parallel`: whether blocks may come from several threads, in any order."""

    parallel: bool

    def write(self, offset: int, block: memoryview) -> None:
        """Write a block. All blocks but the last are whole pages; memory behind the last one may be read up to a
        page."""

    def finish(self) -> None:
        """Flush everything to the disk, with the file's final size."""

    def abandon(self) -> None:
        """Remove the file."""


class Folder(Protocol):
    """A folder. Methods raise OSError if the file system fails; callers add what they were doing."""

    name: str

    def __str__(self) -> str: ...

    def child(self, name: str) -> Folder: ...

    def names(self) -> list[str]:
        """The sorted names in it; empty if it does not exist."""

    def is_link(self) -> bool:
        """Whether it is a link to a folder, whose content must not be changed."""

    def make(self) -> None:
        """Make the folder if it does not exist; a link in its place is removed."""

    def size(self, name: str) -> int | None:
        """The size of a file in bytes; None if it does not exist."""

    def in_place_of(self, name: str) -> str:
        """What there is in place of a file of this name, such as "a link"; empty for a file, and for nothing."""

    def read(self, name: str) -> bytes: ...

    def read_into(self, name: str, offset: int, memory: memoryview) -> int:
        """Read the file's bytes from `offset` on into the memory. Returns the number of bytes read."""

    def put(self, name: str, data: Iterable[bytes | memoryview]) -> None:
        """Write a file atomically from its parts, in order. It replaces a file of that name."""

    def create(self, name: str, size: int) -> NewFile: ...

    def remove(self, name: str) -> None: ...

    def remove_all(self) -> None:
        """Remove the folder with its content."""


def is_plain_name(name: str) -> bool:
    """Whether the text names a file in a folder, and cannot lead out of the folder."""
    return _PLAIN_NAME.fullmatch(name) is not None


def folder_of(location: Location, *, links: bool = False) -> Folder:
    """The folder at a path or URL, existing or not. With `links`, files that are links are followed.

    Raises CheckpointError for a URL without fsspec, or of an unknown kind.
    """
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
    """A folder of the local file system. `inside`: it is a child of another folder, and is not changed if it is a
    link."""

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

    def in_place_of(self, name: str) -> str:
        try:
            mode = os.stat(self.path / name, follow_symlinks=self._links).st_mode
        except OSError:
            return ""
        if stat.S_ISREG(mode):
            return ""
        kinds = {stat.S_IFLNK: "a link, which is not followed", stat.S_IFIFO: "a FIFO", stat.S_IFDIR: "a folder"}
        return kinds.get(stat.S_IFMT(mode), "no regular file")

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
        with self._descriptor() as here:
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
        with self._descriptor() as here:
            return _LocalFile(self.path / name, os.open(name, _NEW | os.O_TRUNC, 0o644, dir_fd=here), size)

    def remove(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError), self._descriptor() as here:
            os.unlink(name, dir_fd=here)

    def remove_all(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)  # does not follow a link

    def _opened(self, name: str) -> int:
        """A file descriptor for reading; raises OSError for anything but a regular file."""
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if self._links else os.O_NOFOLLOW)
        found = os.open(self.path / name, flags)
        if not stat.S_ISREG(os.fstat(found).st_mode):
            os.close(found)
            raise OSError(errno.EINVAL, "it is not a regular file", str(self.path / name))
        return found

    @contextlib.contextmanager
    def _descriptor(self) -> Iterator[int]:
        """A descriptor of the folder, through which names stay valid if its path changes meanwhile."""
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | (os.O_NOFOLLOW if self._inside else 0)
        here = os.open(self.path, flags)
        try:
            yield here
        finally:
            os.close(here)


class _LocalFile:
    """Written past the page cache if the file system allows it, which is about three times as fast."""

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
                # The file system has no direct writes, or a short write left the rest of a page.
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
        """Switch direct writes on or off. Returns whether they could be set."""
        flag = getattr(os, "O_DIRECT", 0)
        flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
        try:
            fcntl.fcntl(self._fd, fcntl.F_SETFL, flags | flag if on else flags & ~flag)
        except OSError:
            return False
        return bool(flag)


class RemoteFolder:
    """A folder of an fsspec file system. A file appears when it is finished, as in object stores."""

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

    def in_place_of(self, name: str) -> str:
        return ""

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
    """A file that is written from its beginning to its end."""

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
    """Flush the names in a folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
