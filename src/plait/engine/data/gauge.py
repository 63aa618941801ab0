"""Measures the time that steps wait for data."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

_NUM_STEPS = 20
_TOO_MUCH = 0.1  # share of the time
_FEW_STEPS = 3  # fewest slow steps that count: a single one may be due to a busy machine
_SHORTEST_STEP = 1e-3  # seconds; a loop with shorter steps is not training


class Waited(NamedTuple):
    """Seconds spent waiting for batches: for the last one, and for all."""

    last: float
    total: float


class WaitGauge:
    """Measures waits between `asked`, when a batch is requested, and `got`. `clock` returns seconds."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.waited = Waited(0.0, 0.0)
        self._clock = clock
        self._asked = 0.0
        self._got: float | None = None
        self._steps: deque[tuple[float, float]] = deque(maxlen=_NUM_STEPS)  # (waited, worked) seconds

    def asked(self) -> None:
        """A batch is requested."""
        self._asked = self._clock()

    def got(self) -> None:
        """The requested batch is there."""
        now = self._clock()
        waited = now - self._asked
        self.waited = Waited(waited, self.waited.total + waited)
        if self._got is not None:  # the first batch cannot be read ahead
            self._steps.append((waited, self._asked - self._got))
        self._got = now

    def share_if_too_much(self) -> float | None:
        """The share of the last 20 steps' time spent waiting, if it is over a tenth and several steps waited; else
        None."""
        waited, worked = (sum(times) for times in zip(*self._steps, strict=True)) if self._steps else (0.0, 0.0)
        slow = sum(w > _TOO_MUCH * (w + b) for w, b in self._steps)
        if len(self._steps) < _NUM_STEPS or slow < _FEW_STEPS or worked < _NUM_STEPS * _SHORTEST_STEP:
            return None
        share = waited / (waited + worked)
        return share if share > _TOO_MUCH else None
