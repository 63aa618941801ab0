"""Temporary folders that no other user can look into, and that do not outlive the processes that made them for long.

    /tmp/plait-1000/ranks-x1f04q8w/

The folder of a user is theirs alone (mode 0700) or is not used. Whoever makes a folder in it holds a lock on it, which
the system lets go of when the process ends, however that happens; folders that nobody holds are removed by the next
process that makes one. systemd-tmpfiles leaves a locked folder alone as well.
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
    """A new folder of mode 0700 with a short path (a socket's has at most 107 bytes), removed at the end.

    It lies in /tmp where there is one, whatever TMPDIR says, because that is this machine's own. OSError where no
    folder can be made.
    """
    parent = _of_this_user(_shared())
    within = os.open(parent, _FOLDER)
    try:
        fcntl.flock(within, fcntl.LOCK_EX)  # between a folder's making and its lock nobody looks for abandoned ones
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
    """Whether this is a folder, and no link, that belongs to this user and that nobody else may enter."""
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
    """The user's own folder, or one of an unguessable name where another user has taken the one that it should have."""
    path = base / _name()
    with suppress(OSError):
        os.mkdir(path, 0o700)
    return path if is_ours_alone(path) else Path(tempfile.mkdtemp(prefix="plait-", dir=base))


def _remove_abandoned(parent: Path) -> None:
    """Remove the folders whose process has ended without doing so."""
    for path in parent.iterdir():
        try:
            lock = os.open(path, _FOLDER)
        except OSError:  # gone meanwhile
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
        except OSError:  # somebody uses it
            pass
        finally:
            os.close(lock)
