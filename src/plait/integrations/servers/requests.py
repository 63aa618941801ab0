"""The queue of a worker's tasks at the coordinator: the first request gets the first task."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class Requests(Generic[T]):
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
