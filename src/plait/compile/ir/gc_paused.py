"""Pause garbage collection while a graph is built: no node is garbage, and each full collection visits them all."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_lock = threading.Lock()
_num_inside = 0
_was_enabled = False


@contextmanager
def collection_paused() -> Iterator[None]:
    """Pause it within the context; if several threads are inside, until the last one leaves."""
    global _num_inside, _was_enabled
    with _lock:
        if _num_inside == 0:
            _was_enabled = gc.isenabled()
            gc.disable()
        _num_inside += 1
    try:
        yield
    finally:
        with _lock:
            _num_inside -= 1
            if _num_inside == 0 and _was_enabled:
                gc.enable()
