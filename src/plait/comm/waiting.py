"""How a rank waits for peers of its host: it spins while that is short, then yields, then sleeps, and looks after them.

A peer that has failed or whose process has ended while it is still needed ends the wait with RankFailed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from plait.errors import RankFailed, WorldError

_SPINS = 200  # some 50 us
_YIELD_SECONDS = 0.002
_SHORT_SLEEP, _LONG_SLEEP = 50e-6, 500e-6
_LOOK_SECONDS = 0.2
_GIVE_UP_SECONDS = 1800.0  # as torch.distributed


class Patience:
    """One rank's waiting in one group. `needs(i)`: whether rank i still owes something; `failed(i)`: it said so."""

    def __init__(
        self,
        ranks: tuple[int, ...],
        peers: list[int],
        pids: list[int],
        needs: Callable[[int], bool],
        failed: Callable[[int], bool],
        crowded: bool,
    ) -> None:
        self._ranks, self._peers, self._pids = ranks, peers, pids
        self._needs, self._failed = needs, failed
        self._spins = 0 if crowded else _SPINS  # with more ranks than cores, spinning keeps a peer from running
        self.begin()

    def begin(self) -> None:
        self._num_pauses = 0
        self._gone: int | None = None

    def pause(self) -> bool:
        """Let a little time pass, more the longer it has lasted; True once the wait is not a short one."""
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
            raise RankFailed(self._ranks[self._gone], "its process ended without a word (killed, or out of memory?)")
        # What a peer did just before it ended may be unread: only a second look decides.
        self._gone = next((i for i in self._peers if self._needs(i) and not alive(self._pids[i])), None)
        if now - self._began > _GIVE_UP_SECONDS:
            late = [self._ranks[i] for i in self._peers if self._needs(i)]
            raise WorldError(f"waited {_GIVE_UP_SECONDS:.0f} s for ranks {late}, which run but do not come")


def alive(pid: int) -> bool:
    """Whether the process runs; one that has ended but was not yet collected by its parent does not."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except OSError:
        return False
