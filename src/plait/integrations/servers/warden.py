"""Ends what Ray has started on this machine once the process that had it start is gone.

Ray's own processes see that by themselves, but for the agents of its raylet: those first try for a minute to tell the
rest of Ray. Run as a script, which imports nothing but what every Python has.
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
def warden() -> Iterator[None]:
    """Have one while Ray runs, which is a child of this process. It ends what is left also when all goes well."""
    if not os.path.isdir("/proc/self/task"):
        yield
        return
    command = [sys.executable, "-I", "-S", __file__, str(os.getpid())]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)  # out of reach of Ctrl-C
    try:
        yield
    finally:
        process.communicate()


def watch(launcher: int) -> None:
    """Until standard input ends, which the launcher holds the other end of; then kill what Ray has left."""
    seen: dict[int, str] = {}  # when each began, by its number
    while not select.select([0], [], [], _LOOK_SECONDS)[0]:
        seen = {pid: began for pid, began in (seen | _of_ray(launcher)).items() if _began(pid) == began}
    for pid, began in seen.items():
        if _began(pid) == began:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _of_ray(launcher: int) -> dict[int, str]:
    roots = [pid for pid in _children(launcher) if _stat(pid)[0] in _ROOTS]
    found: dict[int, str] = {}
    while roots:
        pid = roots.pop()
        found[pid] = _began(pid)
        roots += _children(pid)
    return found


def _children(pid: int) -> list[int]:
    found = []
    with suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with suppress(OSError), open(f"/proc/{pid}/task/{thread}/children") as file:
                found += [int(word) for word in file.read().split()]
    return found


def _began(pid: int) -> str:
    """When the process began, in ticks; empty where there is none any more."""
    return _stat(pid)[1]


def _stat(pid: int) -> tuple[str, str]:
    try:
        with open(f"/proc/{pid}/stat") as file:
            head, _, rest = file.read().rpartition(")")
    except OSError:
        return "", ""
    words = rest.split()
    return head.partition("(")[2], "" if words[0] in "ZX" else words[19]


if __name__ == "__main__":
    watch(int(sys.argv[1]))
