"""What a worker asks for and what it is given, in step: the first to ask gets the first thing."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class Requests(Generic[T]):
    """A queue whose things go to those who wait in the order in which they began to.

    Not so an asyncio.Queue: who asks after a thing was put in, and before the one that it woke has run, takes it. The
    answers to two pushes of a worker were then exchanged, and it computed its tasks in another order.
    """

    def __init__(self) -> None:
        self._things: deque[T] = deque()
        self._waiting: deque[asyncio.Future[T | None]] = deque()
        self._closed = False

    def put(self, thing: T) -> None:
        while self._waiting:
            first = self._waiting.popleft()
            if not first.done():  # as one is that was given up
                first.set_result(thing)
                return
        self._things.append(thing)

    async def get(self) -> T | None:
        """The next thing, once there is one; None where there will be none any more."""
        if self._things:
            return self._things.popleft()
        if self._closed:
            return None
        self._waiting.append(asyncio.get_running_loop().create_future())
        return await self._waiting[-1]

    def close(self) -> None:
        """There is nothing after what was put in."""
        self._closed = True
        while self._waiting:
            first = self._waiting.popleft()
            if not first.done():
                first.set_result(None)
