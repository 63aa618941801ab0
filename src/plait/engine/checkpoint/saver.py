"""Saves in the background: one save at a time. The error of a save is raised by the next save, step or close."""

from __future__ import annotations

import atexit
import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import nullcontext

from torch import Tensor

from plait.comm.device import page_memory
from plait.engine.checkpoint.barrier import Barrier
from plait.errors import CheckpointError


class Saver:
    """The background saves of one trainer. It keeps the host memory that tensors are copied into, for the next save."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._done = threading.Event()
        self._done.set()
        self._error: CheckpointError | None = None
        self._barrier: Barrier | None = None
        self._memory: list[Tensor] = []
        atexit.register(_report, weakref.ref(self))

    def memory(self, index: int, num_bytes: int, pinned: bool) -> Tensor:
        """Page memory for file `index` of a save; reused from earlier saves if it is large enough."""
        while len(self._memory) <= index:
            self._memory.append(page_memory(0))
        if self._memory[index].numel() < num_bytes:
            self._memory[index] = page_memory(0)  # free the old memory first
            self._memory[index] = page_memory(num_bytes, pinned)
        return self._memory[index]

    def start(self, barrier: Barrier, save: Callable[[], None], after: Callable[[], None]) -> None:
        """Run `save`, and `after` if it succeeds, in a thread that the process waits for before it exits."""
        if self._thread is not None:
            self._thread.join()
        done = threading.Event()

        def run() -> None:
            try:
                save()
            except CheckpointError as error:
                self._error = error
            except Exception as error:
                self._error = CheckpointError(f"a save failed: {type(error).__name__}: {error}")
            finally:
                failed = self._error is not None
                done.set()
            if not failed:
                after()

        self._barrier, self._done = barrier, done
        self._thread = threading.Thread(target=run, name="plait saver")
        self._thread.start()

    def wait(self) -> None:
        """Wait for the save in flight. Raises CheckpointError, which names the file, if it failed."""
        if not self._done.is_set():
            barrier = self._barrier
            with nullcontext() if barrier is None else barrier.waiting():
                self._done.wait()
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def check(self, step: int) -> None:
        """Raise the error of a failed save. Called before every step; all ranks raise at the same step."""
        if self._error is not None and self._barrier is not None and self._barrier.raise_together(step):
            self.wait()


def _report(reference: weakref.ref[Saver]) -> None:
    """Print the error of the last save at the end of a process that has not asked for it."""
    saver = reference()
    if saver is not None and saver._error is not None:
        print(f"plait: {saver._error}", file=sys.stderr)
