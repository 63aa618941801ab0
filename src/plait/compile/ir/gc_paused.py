"""No garbage collection while a graph is made: nothing of it is garbage, and each full collection walks all of it."""

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
    """Also when several threads are inside: the last one out switches it on again."""
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
