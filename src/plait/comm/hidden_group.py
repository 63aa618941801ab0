"""Hides the default process group of torch.distributed from model, loss and optimizer.

They are written for one device and the whole batch, but may run in a process of a group. Many losses ask for the group,
to divide by the number of processes or to gather features. They then find none, and do what they do on one device.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch.distributed as dist

from plait.compile.capture.capture_errors import not_communicating


class _Hidden:
    """The default process group, taken away while any thread is inside: ranks may be threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_inside = 0
        self._group: dist.ProcessGroup | None = None

    def enter(self) -> None:
        with self._lock:
            if not self._num_inside and dist.is_available() and dist.is_initialized():
                # The group, and not the function is_initialized, which code may have imported by its name.
                self._group, dist.group.WORLD = dist.group.WORLD, None
            self._num_inside += 1

    def leave(self) -> None:
        with self._lock:
            self._num_inside -= 1
            if not self._num_inside and self._group is not None:
                dist.group.WORLD, self._group = self._group, None


_hidden = _Hidden()


@contextmanager
def without_process_group(where: Callable[[BaseException], str]) -> Iterator[None]:
    """Context in which torch.distributed has no default process group. Groups that code holds work as before.

    `where` names the code that has raised an exception. Raises PlanError if that code needs the default group.
    """
    _hidden.enter()
    try:
        with not_communicating(where):
            yield
    finally:
        _hidden.leave()
