"""The coordinator alone: its calls in an event loop, with servers that answer at once."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from plait.integrations.ray_servers.coordinator import Coordinator
from plait.integrations.ray_servers.messages import Note, Task, TaskQueue
from plait.integrations.ray_servers.server import Server
from tests.served import job_of


class Handle:
    """A server as the coordinator has it: what its calls return is awaited."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self.where = SimpleNamespace(remote=lambda: self._answer(server.standing))

    def __getattr__(self, name: str) -> Any:
        def call(*values: Any) -> Any:
            return self._answer(getattr(self._server, name)(*values))

        def both(*values: Any) -> list[Any]:
            return [self._answer(each) for each in getattr(self._server, name)(*values)]

        return SimpleNamespace(remote=call, options=lambda num_returns: SimpleNamespace(remote=both))

    def _answer(self, value: Any) -> asyncio.Future[Any]:
        found = asyncio.get_running_loop().create_future()
        found.set_result(value)
        return found


def test_answers_to_pushes_come_in_the_order_of_the_pushes(tmp_path: Path) -> None:
    """Also where a worker's second push is there before the answer to its first has gone out."""
    job = job_of("workers=2 servers=1 overlap=1", tmp_path, steps=20, order=(0, 1, 1), scheduler=None)
    server = Server(job.name, job.shards[0], job.server_optimizer, None, str(tmp_path / "server"))

    async def run() -> list[Task | None]:
        coordinator = Coordinator(job, [Handle(server)])
        one, two = await asyncio.gather(*(coordinator.join(worker, job.fingerprint) for worker in range(2)))
        assert isinstance(one, list) and isinstance(two, list)

        def push(worker: int, number: int, task: Task) -> asyncio.Task[Task | None]:
            note = Note(worker, number, job.name, task.piece, task.version, 0.0, 1.0, 1)
            return asyncio.create_task(coordinator.push(note, [[None] * len(job.shards[0])]))

        early = push(1, 1, two[0])  # before its turn
        for _ in range(5):
            await asyncio.sleep(0)
        assert not early.done()
        found = await asyncio.gather(early, push(0, 1, one[0]), push(1, 2, two[1]))
        coordinator._metrics.close()
        return list(found)

    first, other, second = asyncio.run(run())
    assert first is not None and second is not None and other is not None
    assert (other.version, first.version, second.version) == (1, 2, 3)
    assert first.piece < second.piece and first.then == second.piece


def test_who_asks_first_is_given_the_first_thing() -> None:
    async def run() -> list[int | None]:
        requests: TaskQueue[int] = TaskQueue()
        gone, first = asyncio.create_task(requests.get()), asyncio.create_task(requests.get())
        await asyncio.sleep(0)
        gone.cancel()
        await asyncio.sleep(0)
        requests.put(1)
        requests.put(2)
        second = await requests.get()  # before `first` has run again
        requests.put(3)
        requests.close()
        return [await first, second, await requests.get(), await requests.get()]

    assert asyncio.run(run()) == [1, 2, 3, None]
