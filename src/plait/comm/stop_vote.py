"""Stops all ranks at the same step when any of them gets SIGTERM or Ctrl-C, without messages in normal running.

A rank that wants to stop posts the number of its next step in the key-value store, and from then on reads the store at
every step. The others notice within about a second, and post too. When all have posted, all stop before step
max(posts) + 1. Training keeps ranks within one step of each other: a rank that reaches that step knows that every rank
has begun step max(posts), and hence has posted. Ranks that synchronize less often stop after the next time that they
synchronize.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, Self

from plait.comm.failure import watch
from plait.comm.process_world import ProcessWorld
from plait.comm.protocol import World

_WISH = "stop"
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopVote:
    """Decides at each step boundary whether to stop. Handles SIGTERM and SIGINT until `close`.

    >>> with StopVote(world) as vote:
    ...     while not vote.should_stop(step): ...
    """

    def __init__(self, world: World, meet_after: Callable[[int], int] = lambda step: step + 1) -> None:
        """`meet_after(step)` is the first step at whose beginning a rank knows that all ranks have begun `step`."""
        self._world = world
        self._meet_after = meet_after
        self._wished = False
        self._posted = False
        self._stop_before: int | None = None
        self._handlers: dict[int, Any] = {}
        self._end_watch: Callable[[], None] | None = None
        if threading.current_thread() is threading.main_thread():
            self._handlers = {number: signal.signal(number, self._on_signal) for number in _SIGNALS}
        self._watched = isinstance(world, ProcessWorld) and world.mesh.size > 1
        if self._watched:
            self._end_watch = watch(world.store, _WISH, self._on_wish)

    def request(self) -> None:
        """Ask all ranks to stop soon."""
        self._wished = True

    def should_stop(self, step: int) -> bool:
        """Whether all ranks stop now, before they begin `step`. Call it before every step, with the step's number."""
        store, size = self._world.store, self._world.mesh.size
        if not self._watched and not self._wished:
            self._wished = store.get(_WISH) is not None  # within one process this is cheap
        if not self._wished:
            return False
        if size == 1:
            return True
        if not self._posted:
            self._posted = True
            store.set(f"{_WISH}/{self._world.rank}", str(step))
            store.set(_WISH, "yes")
        if self._stop_before is None:
            posts = [store.get(f"{_WISH}/{rank}") for rank in range(size)]
            if None not in posts:
                self._stop_before = self._meet_after(max(int(post or 0) for post in posts))
        return self._stop_before is not None and step >= self._stop_before

    def close(self) -> None:
        """Restore the former signal handlers."""
        if self._end_watch is not None:
            self._end_watch()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._wished and number == signal.SIGINT:
            raise KeyboardInterrupt  # the second Ctrl-C: stop now
        self._wished = True

    def _on_wish(self, text: str) -> None:
        self._wished = True
