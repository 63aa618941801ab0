"""Temporary folders that no other user can enter, and that do not long outlive the processes that made them.

    /tmp/plait-1000/ranks-x1f04q8w/

The folder of a user is used only if it is theirs alone (mode 0700). A process that makes a folder in it holds a lock on
that folder, which the system releases when the process ends, in whatever way. The next process that makes a folder
removes those that nobody holds. systemd-tmpfiles leaves a locked folder alone as well.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@contextmanager
def private_folder(kind: str) -> Iterator[Path]:
    """A new folder of mode 0700, removed at the end; its path is short, as a socket's has at most 107 bytes.

    It lies in /tmp if there is one, whatever TMPDIR says, because /tmp is local to this machine. Raises OSError if no
    folder can be made.
    """
    parent = _of_this_user(_shared())
    within = os.open(parent, _FOLDER)
    try:
        fcntl.flock(within, fcntl.LOCK_EX)  # so that nobody removes the folder before it is locked
        _remove_abandoned(parent)
        folder = Path(tempfile.mkdtemp(prefix=f"{kind}-", dir=parent))
        lock = os.open(folder, _FOLDER)
        fcntl.flock(lock, fcntl.LOCK_EX)
    finally:
        os.close(within)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)
        if parent.name != _name():
            with suppress(OSError):
                parent.rmdir()


def is_ours_alone(path: Path) -> bool:
    """Whether `path` is a folder (not a link) that belongs to this user and that nobody else may enter."""
    try:
        found = os.lstat(path)
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077


def _name() -> str:
    return f"plait-{os.geteuid()}"


def _shared() -> Path:
    return Path("/tmp") if os.access("/tmp", os.W_OK | os.X_OK) else Path(tempfile.gettempdir())


def _of_this_user(base: Path) -> Path:
    """The user's own folder, or one with an unguessable name if another user has taken its path."""
    path = base / _name()
    with suppress(OSError):
        os.mkdir(path, 0o700)
    return path if is_ours_alone(path) else Path(tempfile.mkdtemp(prefix="plait-", dir=base))


def _remove_abandoned(parent: Path) -> None:
    """Remove the folders whose process has ended without removing them."""
    for path in parent.iterdir():
        try:
            lock = os.open(path, _FOLDER)
        except OSError:  # removed meanwhile
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
        except OSError:  # still in use
            pass
        finally:
            os.close(lock)
