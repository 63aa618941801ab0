"""One rank's failure stops all, and is shown once.

The first rank to raise puts its report on the board. Every other rank learns of it from a thread that looks at the
board once a second, or from the errors of its own collectives, and leaves without a word. A script without `guard`
learns of it where it waits (comm/monitor.py), and leaves its own report at its end.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn
from weakref import WeakSet

from plait.comm.agree import wait_for_notes
from plait.comm.key_value_store import KeyValueStore, LocalStore
from plait.comm.launch import first_to_fail
from plait.comm.monitor import FAILURE, FINISHED, Monitor
from plait.comm.protocol import World
from plait.errors import PlaitError, RankFailed, WorldError

_LOOK_SECONDS = 1.0
_GRACE_SECONDS = 1.0  # for a rank that knows of a failure to leave by itself, through its `finally` blocks
_END_SECONDS = 5.0


def watch(board: KeyValueStore, key: str, call: Callable[[str], None]) -> Callable[[], None]:
    """Look for the key about once a second, from another thread, and call with its text once; returns what ends it.

    A board out of reach counts as an empty text: whoever held it is gone.
    """
    over = threading.Event()
    board = board.clone()

    def look() -> None:
        while not over.wait(_LOOK_SECONDS):
            try:
                found = board.get(key)
            except RuntimeError:  # what a store raises once its host is gone
                found = ""
            if found is not None and not over.is_set():
                call(found)
                return

    thread = threading.Thread(target=look, name=f"watch {key}", daemon=True)
    thread.start()

    def end() -> None:
        over.set()
        if thread is not threading.current_thread():
            thread.join(_END_SECONDS)  # a thread that Python's end finds within C++ code brings the process down

    return end


@contextmanager
def guard(world: World) -> Iterator[None]:
    """Wrap all that a rank does with its world. Among processes, the first exception on any rank ends all of them.

    That exception is printed once, with its rank; all ranks exit with status 1. A world of one process just raises.
    """
    if world.mesh.size == 1 or isinstance(world.board, LocalStore):
        yield
        return
    end_watch = watch(world.board, FAILURE, _leave)
    try:
        yield
    except BaseException as error:
        if isinstance(error, SystemExit) and error.code in (None, 0):
            _finish(world)
            raise
        _report(world.board, world.rank, error)
        world.abort()  # type: ignore[attr-defined]  # of ranks that are processes
        _exit()
    else:
        _finish(world)
    finally:
        end_watch()


def _leave(report: str) -> None:
    time.sleep(_GRACE_SECONDS)
    _exit()


def leave(board: KeyValueStore, rank: int, error: BaseException) -> NoReturn:
    """Report the error and end this process, which waits for ever where no exception reaches it."""
    _report(board, rank, error)
    _exit()


_monitors: WeakSet[Monitor] = WeakSet()


def at_exit(monitor: Monitor) -> None:
    """Once Python ends, tell the other ranks whether this one has finished, or what it raised."""
    if not _monitors:
        atexit.register(_tell_at_exit)
    _monitors.add(monitor)


def tell_failure(error: BaseException) -> None:
    """Leave the report of an exception that ends this process for the ranks that wait for it. Nothing is printed."""
    for monitor in list(_monitors):
        rank, message = _described(monitor.rank, error)
        report = {"by": monitor.rank, "rank": rank, "message": message, "traceback": ""}
        monitor.close(json.dumps(report))


def let_speak_first(own: int, error: BaseException) -> None:
    """Where the error is of another rank, which has more to say of it, give it the time to do so."""
    if isinstance(error, RankFailed) and error.rank != own:
        time.sleep(2 * _GRACE_SECONDS)


def _tell_at_exit() -> None:
    error = getattr(sys, "last_value", None)  # what Python has shown as unhandled
    if error is not None:
        tell_failure(error)
    for monitor in list(_monitors):
        monitor.close()


def _described(own: int, error: BaseException) -> tuple[int, str]:
    """Which rank has failed, and how."""
    if isinstance(error, RankFailed):
        return error.rank, str(error)
    text = str(error) or ("it was interrupted" if isinstance(error, KeyboardInterrupt) else "no message")
    return own, f"rank {own} failed: {type(error).__name__}: {text}"


def _report(board: KeyValueStore, own: int, error: BaseException) -> None:
    """Print the failure, if it is the first."""
    let_speak_first(own, error)
    rank, message = _described(own, error)
    trace = "" if isinstance(error, PlaitError | SystemExit | KeyboardInterrupt) else "".join(
        traceback.format_exception(error)
    )  # fmt: skip
    report = json.dumps({"by": own, "rank": rank, "message": message, "traceback": trace})
    try:
        first = board.first(FAILURE, report) == report
    except RuntimeError:  # the board's host is gone, which is rank 0's unless torchrun keeps it: let one rank speak
        first = own <= 1
    if first and first_to_fail():
        print(f"{trace}plait: {message}", file=sys.stderr, flush=True)


def _finish(world: World) -> None:
    """A rank that has done its part keeps the board within reach of those that have not."""
    try:
        world.board.set(f"{FINISHED}/{world.rank}", "")
        if world.rank == 0:
            wait_for_notes(world, {r: f"{FINISHED}/{r}" for r in range(world.mesh.size)}, "the end of the run")
    except (RuntimeError, WorldError):  # the board's host was done first, or a rank has died, which its launcher sees
        return


def _exit() -> NoReturn:
    """Leave at once: threads of a broken process group must not hold the process back."""
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            continue
    os._exit(1)
