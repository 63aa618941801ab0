"""Waits for peers of the same host: spins while the wait is short, then yields, then sleeps and checks on the peers.

A peer that fails, or whose process ends, while it is still needed ends the wait with RankFailed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from plait.comm.monitor import LateRanks, Monitor, Wait, timeout
from plait.comm.sharing import alive
from plait.errors import RankFailed, WorldError

_SPINS = 200  # about 50 us
_YIELD_SECONDS = 0.002
_SHORT_SLEEP, _LONG_SLEEP = 50e-6, 500e-6
_LOOK_SECONDS = 0.2


class PeerWait:
    """The waits of one rank in one group.

    `needs(i)` says whether this rank still waits for rank i, and `failed(i)` whether rank i has reported a failure.
    `monitor`, if given, is told of long waits.
    """

    def __init__(
        self,
        ranks: tuple[int, ...],
        peers: list[int],
        pids: list[int],
        needs: Callable[[int], bool],
        failed: Callable[[int], bool],
        crowded: bool,
        monitor: Monitor | None = None,
    ) -> None:
        self._monitor = monitor
        self._ranks, self._peers, self._pids = ranks, peers, pids
        self._needs, self._failed = needs, failed
        self._spins = 0 if crowded else _SPINS  # with more ranks than cores, spinning would keep a peer from running
        self._wait: Wait | None = None
        self.begin()

    def begin(self, what: Callable[[], str] = str, late: LateRanks | None = None) -> None:
        """Begin a wait. `what()` names it in messages, and `late()` the ranks that it is for, if they are known."""
        self._num_pauses = 0
        self._gone: int | None = None
        self._what, self._late = what, late

    def end(self) -> None:
        self._what, self._late = str, None  # they may hold a reference to the result
        if self._wait is not None and self._monitor is not None:
            self._monitor.end(self._wait)
            self._wait = None

    def pause(self) -> bool:
        """Pause, for longer the longer the wait has lasted. Returns whether the wait is long."""
        self._num_pauses += 1
        if self._num_pauses <= self._spins:
            return False
        if self._num_pauses == self._spins + 1:
            self._began = self._looked = time.monotonic()
        if self._num_pauses % 8 and self._num_pauses < self._spins + 2000:
            os.sched_yield()
            return False
        now = time.monotonic()
        if now - self._looked >= _LOOK_SECONDS:
            self._looked = now
            self._look_after_peers(now)
        waited = now - self._began
        if waited < _YIELD_SECONDS:
            os.sched_yield()
        else:
            time.sleep(_SHORT_SLEEP if waited < 0.1 else _LONG_SLEEP)
        return True

    def _look_after_peers(self, now: float) -> None:
        for i in self._peers:
            if self._failed(i):
                raise RankFailed(self._ranks[i], "it stopped the run")
        if self._gone is not None and self._needs(self._gone):
            raise self._why_gone(self._ranks[self._gone])
        # What a peer did just before it ended may be unread, so only a second look decides.
        self._gone = next((i for i in self._peers if self._needs(i) and not alive(self._pids[i])), None)
        if self._monitor is not None and self._late is not None:
            if self._wait is None:
                self._wait = self._monitor.begin(self._what(), self._late)
            self._wait.check()
        elif now - self._began > timeout():
            late = [self._ranks[i] for i in self._peers if self._needs(i)]
            raise WorldError(f"waited {timeout():.0f} s for ranks {late}, which live but do not come")

    def _why_gone(self, rank: int) -> WorldError:
        if self._monitor is not None:
            return self._monitor.why_gone(rank, self._what())
        return RankFailed(rank, "its process ended without a word (killed, or out of memory?)")
