"""A gauge of the time that steps wait for data."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

_NUM_STEPS = 20
_TOO_MUCH = 0.1  # of the time
_FEW_STEPS = 3  # that waited so long: one that did may have met a busy machine
_SHORTEST_STEP = 1e-3  # seconds; a loop that does less with its batches is not training


class Waited(NamedTuple):
    """Seconds spent on waiting for batches."""

    last: float
    total: float


class WaitGauge:
    """Told when a batch is asked for and when it is there; `clock` gives seconds."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.waited = Waited(0.0, 0.0)
        self._clock = clock
        self._asked = 0.0
        self._got: float | None = None
        self._steps: deque[tuple[float, float]] = deque(maxlen=_NUM_STEPS)  # (waited, worked) seconds

    def asked(self) -> None:
        self._asked = self._clock()

    def got(self) -> None:
        now = self._clock()
        waited = now - self._asked
        self.waited = Waited(waited, self.waited.total + waited)
        if self._got is not None:  # nothing runs ahead of the first batch
            self._steps.append((waited, self._asked - self._got))
        self._got = now

    def share_if_too_much(self) -> float | None:
        """The part of their time that the last 20 steps waited, if it is over a tenth and not of one step alone."""
        waited, worked = (sum(times) for times in zip(*self._steps, strict=True)) if self._steps else (0.0, 0.0)
        slow = sum(w > _TOO_MUCH * (w + b) for w, b in self._steps)
        if len(self._steps) < _NUM_STEPS or slow < _FEW_STEPS or worked < _NUM_STEPS * _SHORTEST_STEP:
            return None
        share = waited / (waited + worked)
        return share if share > _TOO_MUCH else None
