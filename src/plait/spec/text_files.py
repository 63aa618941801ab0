"""Text files that a user names are read whole, of a bounded size; those of a run are written through no link."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import TextIO

from plait.errors import ConfigError

SETTINGS = 1 << 18  # bytes of a file of settings, which is written by hand; TOML takes a while to read
TABLES = 1 << 24  # bytes of a file that a program has written


def read_bounded(path: Path, most: int) -> str:
    """The text of a file. Raises OSError, with the reason as `strerror`, for what is no regular file, such as a device
    or a pipe, and for more than `most` bytes; UnicodeDecodeError for what is not UTF-8."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe that nobody writes would not open else
    with open(handle, "rb") as file:
        mode = os.fstat(handle).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "it is no regular file; write its text into one", str(path))
        found = file.read(most + 1)
    if len(found) > most:
        raise OSError(errno.EFBIG, f"it has more than {most >> 10:,} KiB; give a shorter file", str(path))
    return found.decode("utf-8").replace("\r\n", "\n")


def open_in_run(path: Path, mode: str = "w") -> TextIO:
    """Open a file of a run's folder to write whole lines into it. Raises ConfigError if it is a link, which might lead
    to a file of something else, or cannot be written."""
    try:
        return open(path, mode, buffering=1, encoding="utf-8", opener=_through_no_link)  # type: ignore[return-value]
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise ConfigError(
                f"{path} is a link, through which a run does not write; remove it, or name another train.out"
            ) from None
        raise ConfigError(f"cannot write {str(path)!r}: {error.strerror}; name another train.out") from None


def _through_no_link(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
