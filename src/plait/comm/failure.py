"""One rank's failure stops all, and is shown once.

The first rank to raise puts its report on the board. Every other rank learns of it from a thread that looks at the
board once a second, or from the errors of its own collectives, and leaves without a word.
"""

from __future__ import annotations

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

from plait.comm.board import Board
from plait.comm.launch import first_to_fail
from plait.comm.process import ProcessWorld
from plait.comm.protocol import World
from plait.errors import PlaitError, RankFailed

_FAILURE = "failure"
_LOOK_SECONDS = 1.0
_GRACE_SECONDS = 1.0  # for a rank that knows of a failure to leave by itself, through its `finally` blocks
_END_SECONDS = 5.0
_LAST_SECONDS = 60.0  # that rank 0, which may hold the board, waits at the end for the others


def watch(board: Board, key: str, call: Callable[[str], None]) -> Callable[[], None]:
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
    if not isinstance(world, ProcessWorld) or world.mesh.size == 1:
        yield
        return
    end_watch = watch(world.board, _FAILURE, _leave)
    try:
        yield
    except BaseException as error:
        if isinstance(error, SystemExit) and error.code in (None, 0):
            _finish(world)
            raise
        _report(world, error)
        world.abort()
        _exit()
    else:
        _finish(world)
    finally:
        end_watch()


def _leave(report: str) -> None:
    time.sleep(_GRACE_SECONDS)
    _exit()


def _report(world: ProcessWorld, error: BaseException) -> None:
    """Print the failure, if it is the first."""
    rank = error.rank if isinstance(error, RankFailed) else world.rank
    message = str(error) if isinstance(error, RankFailed) else f"rank {rank} failed: {type(error).__name__}: {error}"
    if isinstance(error, RankFailed) and _has_finished(world, rank):
        message = (
            f"rank {rank} has finished while rank {world.rank} still waits for it; give every rank the same number of"
            " batches"
        )
    trace = "" if isinstance(error, PlaitError | SystemExit | KeyboardInterrupt) else "".join(
        traceback.format_exception(error)
    )  # fmt: skip
    report = json.dumps({"by": world.rank, "rank": rank, "message": message, "traceback": trace})
    try:
        first = world.board.first(_FAILURE, report) == report
    except RuntimeError:  # the board's host is gone, which is rank 0's unless torchrun keeps it: let one rank speak
        first = world.rank == min(1, world.mesh.size - 1)
    if first and first_to_fail():
        print(f"{trace}plait: {message}", file=sys.stderr, flush=True)


def _has_finished(world: ProcessWorld, rank: int) -> bool:
    try:
        return world.board.get(f"finished/{rank}") is not None
    except RuntimeError:  # the board's host is gone
        return False


def _finish(world: ProcessWorld) -> None:
    """A rank that has done its part keeps the board within reach of those that have not."""
    try:
        world.board.set(f"finished/{world.rank}", "")
        if world.rank == 0:
            world.board.missing([f"finished/{rank}" for rank in range(world.mesh.size)], _LAST_SECONDS)
    except RuntimeError:  # the board's host was done first
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
