"""Stops all ranks at the same step when any of them gets SIGTERM, SIGHUP or Ctrl-C, without messages in normal running.

A rank that wants to stop posts the number of its next step in the key-value store, and from then on reads the store at
every step. The others notice within about a second, and post too. When all have posted, all stop before step
max(posts) + 1. Training keeps ranks within one step of each other: a rank that reaches that step knows that every rank
has begun step max(posts), and hence has posted. Ranks that synchronize less often stop after the next time that they
synchronize.

A rank that is stuck begins no further step. A thread of each rank looks for one once a stop is wished: if a rank, which
does not itself wait for others, begins no step for a while, or at a second signal at once, the run ends with an error
that names it.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Self

from plait.comm.failure import leave, watch
from plait.comm.process_world import ProcessWorld
from plait.comm.protocol import World
from plait.errors import RankFailed

_WISH = "stop"
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_GRACE_SECONDS = 10.0  # in which a rank begins a step after the wish to stop; longer where steps take long
_LONG_STEPS = 3  # the longest steps so far that a rank is waited for, where that is longer
_LOOK_SECONDS = 0.25
_TWICE_SECONDS = 0.5  # signals that come together are one: `timeout` sends to a process and then to its group


class StopVote:
    """Decides at each step boundary whether to stop. Handles SIGTERM, SIGHUP and SIGINT until `close`; SIGHUP stays
    ignored if it was, as nohup leaves it. `number` is the signal that has asked.

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
        self.number: int = signal.SIGINT
        self._wished_at = self._begun_at = time.monotonic()
        self._longest = 0.0  # seconds of the longest step
        self._num_begun = 0
        self._decided = self._insisted = self._pausing = False
        self._over = threading.Event()
        if threading.current_thread() is threading.main_thread():
            taken = [n for n in _SIGNALS if n != signal.SIGHUP or signal.getsignal(n) is not signal.SIG_IGN]
            self._handlers = {number: signal.signal(number, self._on_signal) for number in taken}
        self._watched = isinstance(world, ProcessWorld) and world.mesh.size > 1
        if self._watched:
            self._end_watch = watch(world.store, _WISH, self._on_wish)
        self._finder: threading.Thread | None = None
        if self._handlers and isinstance(world, ProcessWorld):
            self._finder = threading.Thread(target=self._find_stuck, args=(world,), name="plait stop", daemon=True)
            self._finder.start()

    @contextmanager
    def pausing(self) -> Iterator[None]:
        """A context manager around what takes longer than a step, such as saving: the rank is not stuck then."""
        self._pausing = True
        try:
            yield
        finally:
            self._begun_at, self._pausing = time.monotonic(), False

    def request(self) -> None:
        """Ask all ranks to stop soon."""
        self._wish()

    def _wish(self) -> None:
        if not self._wished:
            self._wished_at = time.monotonic()
            self._wished = True

    def should_stop(self, step: int) -> bool:
        """Whether all ranks stop now, before they begin `step`. Call it before every step, with the step's number."""
        self._decided = self._decides(step)
        now = time.monotonic()
        if self._num_begun > 1:  # the first step also compiles
            self._longest = max(self._longest, now - self._begun_at)
        self._num_begun += 1
        self._begun_at = now
        return self._decided

    def _decides(self, step: int) -> bool:
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
            store.set(_WISH, str(self.number))
        if self._stop_before is None:
            posts = [store.get(f"{_WISH}/{rank}") for rank in range(size)]
            if None not in posts:
                self._stop_before = self._meet_after(max(int(post or 0) for post in posts))
        return self._stop_before is not None and step >= self._stop_before

    def close(self) -> None:
        """Restore the former signal handlers."""
        self._over.set()
        if self._finder is not None and self._finder is not threading.current_thread():
            self._finder.join(_GRACE_SECONDS)
            self._finder = None
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
        if not self._wished:
            self.number = number
            self._wish()
        elif time.monotonic() - self._wished_at < _TWICE_SECONDS:
            return
        elif self._decided or self._finder is None:
            raise KeyboardInterrupt  # the second: stop now, in the middle of a save
        else:
            self._insisted = True

    def _on_wish(self, text: str) -> None:
        if text.isdecimal() and not self._wished:
            self.number = int(text)
        self._wish()

    def _find_stuck(self, world: ProcessWorld) -> None:
        """The thread's side: end the run once a rank is stuck that all would wait for."""
        seen: dict[int, tuple[int, float]] = {}  # by rank: the steps that it has begun, and when that was first seen
        while not self._over.wait(_LOOK_SECONDS):
            if not self._wished or self._decided or (self._pausing and not self._insisted):
                seen.clear()
                continue
            now, limit = time.monotonic(), max(_GRACE_SECONDS, _LONG_STEPS * self._longest)
            name = signal.Signals(self.number).name
            why = f"it began no further step in the {limit:.0f} s after {name}"
            if self._insisted:
                limit, why = 0.0, f"it was stopped at once, by a second signal after {name}"
            after = "what came after the last checkpoint is lost"
            if world.monitor is None:
                if now - max(self._wished_at, self._begun_at) > limit:
                    print(f"plait: the run was ended: {why}; {after}", file=sys.stderr, flush=True)
                    os._exit(128 + self.number)
                continue
            try:
                for rank, (steps, waits, doing) in world.monitor.progress().items():
                    begun, since = seen.setdefault(rank, (steps, now))
                    if begun != steps:
                        seen[rank] = (steps, now)
                    elif now - since >= limit and not waits and not self._over.is_set():
                        leave(world.store, world.rank, RankFailed(rank, f"{why}, and {doing}; {after}"))
            except RuntimeError:  # the store's host is gone, which others tell of
                return
