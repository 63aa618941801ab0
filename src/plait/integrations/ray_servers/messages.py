"""The messages between coordinator and workers, and the queue of a worker's tasks.

Messages hold references to values and gradients, not the arrays themselves.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import numpy as np


@dataclass(frozen=True)
class Task:
    """A task of a worker: read the values of `version`, given as one reference per server, and train on `piece`.

    then       the piece after it, which is read ahead
    step       steps of the run that are done
    num_steps  steps that the worker takes before it pushes, one on each of as many batches: `piece` is of the first
    saves      whether the push must contain the state of the worker's own optimizer
    """

    version: int
    piece: int
    then: int
    values: tuple[Any, ...]
    step: int = 0
    num_steps: int = 1
    saves: bool = False


@dataclass(frozen=True)
class Refused:
    """Why a worker may not join."""

    why: str


@dataclass(frozen=True)
class Note:
    """The message that comes with a push.

    number   its number among the worker's pushes
    piece    the piece of data that the gradient was computed on
    base     the version of the values that it was computed on
    weight   the weight of the loss in the mean over pieces
    waited   seconds that the worker waited for values
    data     seconds that the worker waited for data
    moved    bytes that the worker read and pushed
    moments  the state of the worker's own optimizer, by name and key, if the task asked for it
    """

    worker: int
    number: int
    job: str
    piece: int
    base: int
    loss: float
    weight: float
    tokens: int
    waited: float = 0.0
    data: float = 0.0
    moved: int = 0
    buffers: dict[str, np.ndarray] = field(default_factory=dict)
    moments: Any = None


@dataclass(frozen=True)
class Progress:
    """The progress of a run, for display. `tokens` are counted since the coordinator's process started."""

    step: int = 0
    loss: float = float("nan")
    tokens: int = 0
    workers: int = 0
    rate: float = 0.0
    over: bool = False
    messages: tuple[str, ...] = ()


@dataclass(frozen=True)
class End:
    """The end of a run. `error` is the reason if it ended before its last step; `of_loss` says that the loss is the
    reason."""

    step: int
    loss: float
    stopped: bool = False
    error: str = ""
    of_loss: bool = False


T = TypeVar("T")


class TaskQueue(Generic[T]):
    """A queue whose items go to the waiting callers in the order of their requests.

    asyncio.Queue does not guarantee that: a caller that asks after an item was put, but before the woken caller has
    run, takes the item. The answers to two pushes of a worker were then exchanged, and it computed its tasks in another
    order.
    """

    def __init__(self) -> None:
        self._items: deque[T] = deque()
        self._waiting: deque[asyncio.Future[T | None]] = deque()
        self._closed = False

    def put(self, item: T) -> None:
        """Give the item to the caller that has waited longest, or keep it for the next one."""
        while self._waiting:
            first = self._waiting.popleft()
            if not first.done():  # a cancelled request is done
                first.set_result(item)
                return
        self._items.append(item)

    async def get(self) -> T | None:
        """Wait for the next item. None: the queue is closed and empty."""
        if self._items:
            return self._items.popleft()
        if self._closed:
            return None
        self._waiting.append(asyncio.get_running_loop().create_future())
        return await self._waiting[-1]

    def close(self) -> None:
        """Accept no more items; waiting callers get None."""
        self._closed = True
        while self._waiting:
            first = self._waiting.popleft()
            if not first.done():
                first.set_result(None)
