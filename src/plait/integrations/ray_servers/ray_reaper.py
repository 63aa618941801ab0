"""Ends the processes that Ray started on this machine once the launching process is gone.

Ray's processes mostly notice by themselves, but the agents of its raylet first try for a minute to reach the rest of
Ray. This file runs as a script, and imports only the standard library.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_LOOK_SECONDS = 0.5
_ROOTS = ("raylet", "gcs_server")


@contextmanager
def reaper() -> Iterator[None]:
    """Run a reaper process while Ray, a child of this process, runs. It also ends leftover processes after a normal
    shutdown."""
    if not os.path.isdir("/proc/self/task"):
        yield
        return
    command = [sys.executable, "-I", "-S", __file__, str(os.getpid())]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)  # not reached by Ctrl-C
    try:
        yield
    finally:
        process.communicate()


def watch(launcher: int) -> None:
    """Wait until standard input, whose other end the launcher holds, is closed. Then kill the remaining processes of
    Ray."""
    seen: dict[int, str] = {}  # by process id: start time, which tells a reused id apart
    while not select.select([0], [], [], _LOOK_SECONDS)[0]:
        seen = {pid: began for pid, began in (seen | _of_ray(launcher)).items() if _began(pid) == began}
    for pid, began in seen.items():
        if _began(pid) == began:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _of_ray(launcher: int) -> dict[int, str]:
    """The processes of Ray below the launcher: start times by process id."""
    roots = [pid for pid in _children(launcher) if _stat(pid)[0] in _ROOTS]
    found: dict[int, str] = {}
    while roots:
        pid = roots.pop()
        found[pid] = _began(pid)
        roots += _children(pid)
    return found


def _children(pid: int) -> list[int]:
    """The ids of a process's children."""
    found = []
    with suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with suppress(OSError), open(f"/proc/{pid}/task/{thread}/children", encoding="utf-8") as file:
                found += [int(word) for word in file.read().split()]
    return found


def _began(pid: int) -> str:
    """The start time of a process in clock ticks; empty if the process has ended."""
    return _stat(pid)[1]


def _stat(pid: int) -> tuple[str, str]:
    """The name and the start time of a process; both empty if it does not exist."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            head, _, rest = file.read().rpartition(")")
    except OSError:
        return "", ""
    words = rest.split()
    return head.partition("(")[2], "" if words[0] in "ZX" else words[19]


if __name__ == "__main__":
    watch(int(sys.argv[1]))
