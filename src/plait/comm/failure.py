"""Ends all ranks when one fails, and shows the failure once.

The first rank to raise puts its report in the key-value store. Every other rank learns of it from a thread that looks
there once a second, or from errors of its own collectives, and exits without printing. A script without `guard` learns
of it where it waits (comm/monitor.py), and leaves its own report when it ends.
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
_GRACE_SECONDS = 1.0  # time for a rank that knows of a failure to leave by itself, through its `finally` blocks
_END_SECONDS = 5.0


def watch(store: KeyValueStore, key: str, call: Callable[[str], None]) -> Callable[[], None]:
    """Look for a key about once a second, in another thread, and call `call` once with its text.

    A store that is out of reach counts as an empty text, because its host is gone. Returns a function that ends the
    watch.
    """
    over = threading.Event()
    store = store.clone()

    def look() -> None:
        while not over.wait(_LOOK_SECONDS):
            try:
                found = store.get(key)
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
            thread.join(_END_SECONDS)  # Python's exit would crash the process if the thread were inside C++ code

    return end


@contextmanager
def guard(world: World) -> Iterator[None]:
    """A context manager around everything that a rank does with its world.

    If ranks are processes, the first exception on any rank ends all of them: it is printed once, with its rank, and all
    ranks exit with its status. In a world of one process the exception propagates.
    """
    if world.mesh.size == 1 or isinstance(world.store, LocalStore):
        yield
        return
    end_watch = watch(world.store, FAILURE, _leave)
    try:
        yield
    except BaseException as error:
        if isinstance(error, SystemExit) and error.code in (None, 0):
            _finish(world)
            raise
        _report(world.store, world.rank, error)
        world.abort()  # type: ignore[attr-defined]  # of ranks that are processes
        if world.rank == 0:  # which may keep the store: ranks that fail at the same moment look there who was first
            time.sleep(_GRACE_SECONDS)
        _exit(error.status if isinstance(error, PlaitError) else 1)
    else:
        _finish(world)
    finally:
        end_watch()


def _leave(report: str) -> None:
    time.sleep(_GRACE_SECONDS)
    _exit()


def leave(store: KeyValueStore, rank: int, error: BaseException) -> NoReturn:
    """Report the error and end this process, which is stuck in a wait that no exception reaches."""
    _report(store, rank, error)
    _exit()


_monitors: WeakSet[Monitor] = WeakSet()


def at_exit(monitor: Monitor) -> None:
    """When Python exits, tell the other ranks whether this rank has finished, or what it raised."""
    if not _monitors:
        atexit.register(_tell_at_exit)
    _monitors.add(monitor)


def tell_failure(error: BaseException) -> None:
    """Leave the report of an exception that ends this process, for the ranks that wait for it. Prints nothing."""
    for monitor in list(_monitors):
        rank, message = _described(monitor.rank, error)
        report = {"by": monitor.rank, "rank": rank, "message": message, "traceback": ""}
        monitor.close(json.dumps(report))


def let_failed_rank_report(own: int, error: BaseException) -> None:
    """Wait a moment if the error is another rank's failure, so that that rank, which knows more, reports first."""
    if isinstance(error, RankFailed) and error.rank != own:
        time.sleep(2 * _GRACE_SECONDS)


def _tell_at_exit() -> None:
    error = getattr(sys, "last_value", None)  # the unhandled exception that Python has printed
    if error is not None:
        tell_failure(error)
    for monitor in list(_monitors):
        monitor.close()


def _described(own: int, error: BaseException) -> tuple[int, str]:
    """The rank that failed, and a message."""
    if isinstance(error, RankFailed):
        return error.rank, str(error)
    text = str(error) or ("it was interrupted" if isinstance(error, KeyboardInterrupt) else "no message")
    return own, f"rank {own} failed: {type(error).__name__}: {text}"


def _report(store: KeyValueStore, own: int, error: BaseException) -> None:
    """Print the failure if it is the first."""
    let_failed_rank_report(own, error)
    rank, message = _described(own, error)
    trace = "" if isinstance(error, PlaitError | SystemExit | KeyboardInterrupt) else "".join(
        traceback.format_exception(error)
    )  # fmt: skip
    report = json.dumps({"by": own, "rank": rank, "message": message, "traceback": trace})
    try:
        first = store.first(FAILURE, report) == report
    except RuntimeError:  # the host of the store (rank 0, unless torchrun keeps the store) is gone: let one rank print
        first = own <= 1
    if first and first_to_fail():
        print(f"{trace}plait: {message}", file=sys.stderr, flush=True)


def _finish(world: World) -> None:
    """Mark this rank as finished. Rank 0 waits for all others, so that the store stays within reach."""
    try:
        world.store.set(f"{FINISHED}/{world.rank}", "")
        if world.rank == 0:
            wait_for_notes(world, {r: f"{FINISHED}/{r}" for r in range(world.mesh.size)}, "the end of the run")
    except (RuntimeError, WorldError):  # the store's host was done first, or a rank has died, which its launcher sees
        return


def _exit(status: int = 1) -> NoReturn:
    """Exit at once: threads of a broken process group must not keep the process alive."""
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            continue
    os._exit(status)
