"""Starts the ranks of this machine as processes.

Ranks find each other through a folder that only this user may enter: there torch.distributed has its store as a file,
and the launcher's key-value store is a socket. Nothing listens on a port that another user or host could reach.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import NoReturn

from plait.errors import WorldError

FAILURE_FILE = "PLAIT_FAILURE_FILE"  # the rank that creates this file is the one that shows its exception
_FOLDER = "PLAIT_RANKS_FOLDER"  # where the ranks of a launch find each other
_LAUNCHER = "PLAIT_LAUNCHER"  # process id of the launcher
STORE, SOCKET = "store", "socket"

_LOOK_SECONDS = 0.05
_LEAVE_SECONDS = 30.0  # time for the other ranks to end once a rank has failed
_SAVE_SECONDS = 600.0  # time for all ranks to end once they are asked to stop: they may save first
_INSIST_SECONDS = 5.0  # time for all ranks to end after a second signal, or once one fails after the first
_INSISTS = 3  # after this many signals the launcher does not wait
_TWICE_SECONDS = 0.5  # signals that come together are one: `timeout` sends to a process and then to its group
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl(2)


def launch(arguments: Sequence[str], num_processes: int, environment: Mapping[str, str]) -> int:
    """Run `python ARGUMENTS` as `num_processes` ranks of this machine, wait for them, and return the exit status.

    A rank that fails stops the others and shows its own exception; a rank that was killed is reported here. Ctrl-C and
    SIGTERM are passed on to every rank, and the status is then 128 + the signal's number.
    """
    from plait.comm.key_value_store import serve_store
    from plait.comm.private_folder import private_folder  # a late import: before it, Ctrl-C prints no traceback

    # Ranks share the cores: with more threads than cores every collective would wait for the scheduler.
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    common = {"OMP_NUM_THREADS": str(max(1, num_cores // num_processes)), **os.environ, **environment}
    with private_folder("ranks") as folder, serve_store(folder / SOCKET), _signals() as asked:
        common |= {
            FAILURE_FILE: str(folder / "failure"), **meet_in(folder, os.getpid()),
            "WORLD_SIZE": str(num_processes), "LOCAL_WORLD_SIZE": str(num_processes),
            "ROLE_WORLD_SIZE": str(num_processes), "ROLE_NAME": "default", "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1",
            "TORCHELASTIC_RUN_ID": uuid.uuid4().hex, "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": "0",  # tells libraries that ranks are started for them
        }  # fmt: skip
        for name in ("MASTER_ADDR", "MASTER_PORT"):  # set by whatever has started this process
            common.pop(name, None)
        ranks: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(num_processes):
                own = dict.fromkeys(("RANK", "LOCAL_RANK", "ROLE_RANK"), str(rank))
                # A session of its own: Ctrl-C reaches a rank once, and a rank's children can be ended with it.
                ranks.append(subprocess.Popen([sys.executable, *arguments], env=common | own, start_new_session=True))
            failed = _wait(ranks, asked, str(folder / "failure"))
        finally:
            _end(ranks, signal.SIGKILL)
        if asked:
            return 128 + asked[0]
        if failed is None:
            return 0
        status = ranks[failed].returncode
        if status < 0 and first_to_fail(str(folder / "failure")):
            name = signal.Signals(-status).name
            why = "; the machine may have run out of memory" if name == "SIGKILL" else ""
            print(f"plait: rank {failed} was ended by {name}{why}", file=sys.stderr)
        return max(status, 1)


def _wait(ranks: Sequence[subprocess.Popen[bytes]], asked: Sequence[int], failure_file: str) -> int | None:
    """Wait until all ranks have ended. Returns the first that failed, after which the others are ended."""
    failed: int | None = None
    passed_on = 0
    limit = float("inf")
    while None in [rank.poll() for rank in ranks]:
        if passed_on < len(asked):
            _end(ranks, asked[passed_on])
            passed_on += 1
            wait = _SAVE_SECONDS if passed_on == 1 else _INSIST_SECONDS if passed_on < _INSISTS else 0.0
            limit = min(limit, time.monotonic() + wait)
        if failed is None and (failed := _first_failed(ranks)) is not None:
            _end(ranks, signal.SIGTERM)
            limit = min(limit, time.monotonic() + (_INSIST_SECONDS if asked else _LEAVE_SECONDS))
        if time.monotonic() > limit:
            stuck = [str(i) for i, rank in enumerate(ranks) if rank.poll() is None]
            if asked and stuck and first_to_fail(failure_file):
                which = f"rank{'s' * (len(stuck) > 1)} {', '.join(stuck)}"
                name = signal.Signals(asked[0]).name
                print(f"plait: {which} did not end after {name}, and had to be killed", file=sys.stderr)
            _end(ranks, signal.SIGKILL)
        time.sleep(_LOOK_SECONDS)
    return _first_failed(ranks) if failed is None else failed


def _first_failed(ranks: Sequence[subprocess.Popen[bytes]]) -> int | None:
    """A failed rank, preferably one that was killed: the others may have failed because of it."""
    found = [(rank.returncode > 0, i) for i, rank in enumerate(ranks) if rank.returncode]
    return min(found)[1] if found else None


def _end(ranks: Sequence[subprocess.Popen[bytes]], number: int) -> None:
    """Send a signal to the ranks that still run, and to their children."""
    for rank in ranks:
        if rank.poll() is None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(rank.pid, number)
    if number == signal.SIGKILL:
        for rank in ranks:
            rank.wait()


@contextmanager
def _signals() -> Iterator[list[int]]:
    """A list to which each signal is appended when it arrives; signals that were ignored stay ignored."""
    found: list[int] = []
    came: dict[int, float] = {}

    def note(number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if now - came.get(number, float("-inf")) >= _TWICE_SECONDS:
            found.append(number)
            came[number] = now

    main = threading.current_thread() is threading.main_thread()
    before = {number: signal.getsignal(number) for number in _SIGNALS if main}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, note)
    try:
        yield found
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def meet_in(folder: Path, parent: int) -> dict[str, str]:
    """The environment with which ranks meet in `folder`; `parent` is the process id of their launcher."""
    return {_FOLDER: str(folder), _LAUNCHER: str(parent)}


_SIZES = range(1, 1 << 31)


def rank_and_size() -> tuple[int, int]:
    """RANK and WORLD_SIZE of the environment; 0 and 1 where they are not set. Raises WorldError for values that cannot
    be."""
    size = number_of("WORLD_SIZE", 1, _SIZES)
    if "WORLD_SIZE" not in os.environ:  # a plan says how many there are
        return number_of("RANK", 0, range(_SIZES[-1])), size
    return number_of("RANK", 0, range(size), f"WORLD_SIZE={size} has ranks 0 to {size - 1}"), size


def number_of(name: str, default: int, allowed: range, why: str = "") -> int:
    """A whole number of the environment. Raises WorldError if it is none, or not allowed."""
    text = os.environ.get(name)
    if text is None:
        return default
    if not text.strip().isdecimal() or int(text) not in allowed:
        why = why or f"it is a whole number from {allowed[0]} to {allowed[-1]}"
        raise WorldError(f"{name}={text!r}: {why}; start with `plait run` or torchrun, which set it, or correct it")
    return int(text)


def ranks_folder() -> Path | None:
    """The folder where this rank finds the others; None in any process that is not itself a rank of `launch`."""
    if os.environ.get(_LAUNCHER) != str(os.getppid()):
        return None
    return Path(os.environ[_FOLDER])


def end_with_launcher() -> None:
    """Make the system kill this process when the launcher ends, in whatever way. Does nothing without a launcher."""
    if ranks_folder() is not None and sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL)
        if ranks_folder() is None:  # the launcher has just ended
            os._exit(1)


def leave_interrupted() -> NoReturn:
    """End this process after Ctrl-C, without waiting for other ranks. Only one rank prints a message."""
    if first_to_fail():
        print("plait: stopped by Ctrl-C", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(128 + signal.SIGINT)


def first_to_fail(file: str | None = None) -> bool:
    """Whether this rank shows its exception: it is the first of this machine to fail, or has no launcher."""
    file = file or os.environ.get(FAILURE_FILE)
    if file is None:
        return True
    try:
        os.close(os.open(file, os.O_CREAT | os.O_EXCL, 0o600))
    except OSError:
        return False
    return True
