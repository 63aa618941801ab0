"""How long a rank may be late, wherever ranks wait for each other. Needs no torch.

A rank that lives may be as late as PLAIT_TIMEOUT seconds say, by default 30 minutes; after 30 seconds (PLAIT_NOTICE)
the user is told who is waited for. One that has ended is found within seconds (comm/monitor.py).
"""

from __future__ import annotations

import os

from plait.errors import WorldError

TIMEOUT, NOTICE = "PLAIT_TIMEOUT", "PLAIT_NOTICE"
_TIMEOUT_SECONDS, _NOTICE_SECONDS = 1800.0, 30.0


def timeout() -> float:
    """Seconds that a rank which lives may be late."""
    return _seconds(TIMEOUT, _TIMEOUT_SECONDS)


def notice_after() -> float:
    """Seconds of waiting after which the user is told of it; again after twice as many, and so on."""
    return _seconds(NOTICE, _NOTICE_SECONDS)


def _seconds(name: str, default: float) -> float:
    text = os.environ.get(name)
    if not text:
        return default
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if not 0 < found < float("inf"):
        raise WorldError(f"{name}={text!r}; it should be a number of seconds above 0, such as {name}={default:.0f}")
    return found
