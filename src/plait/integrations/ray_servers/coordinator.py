"""The coordinator of a run with parameter servers. It decides which pushes make an update and which workers go on,
orders the updates from the servers, and writes checkpoints.

The coordinator holds no values, so killing it loses none: a restarted coordinator asks the servers for their position
and continues from there. Every server receives its orders from the coordinator, in one order, so that a version number
means the same update on all servers.

    worker  --push(note, references)-->  coordinator  --update(order, references)-->  servers
            <--task(version, references)--       --read()-------------------->
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
import os
from collections import defaultdict
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from plait.errors import CheckpointError, PlaitError
from plait.integrations.ray_servers.full_model import FullModel
from plait.integrations.ray_servers.messages import End, Note, Progress, Refused, Task, TaskQueue
from plait.integrations.ray_servers.run_metrics import Journal, RunMetrics
from plait.integrations.ray_servers.server import Member, Standing, UpdateDone, UpdateOrder
from plait.integrations.ray_servers.server_job import Fingerprint, Job, make_consistency
from plait.schedule.consistency import Commit, Decision, Go, Late, Push, Refuse
from plait.schedule.work_queue import WorkQueue


class Coordinator:
    """An asyncio actor. `servers` and `evaluator` are actor handles, whose calls return references to await."""

    def __init__(self, job: Job, servers: Sequence[Any], evaluator: Any = None) -> None:
        self.job = job
        self._servers = list(servers)
        self._evaluator = evaluator
        self._lock = asyncio.Lock()  # one event is handled at a time
        self._push_handled = asyncio.Condition(self._lock)
        self._last_push: dict[int, int] = {}  # by worker: the number of its last handled push
        self._left: set[int] = set()  # workers that have left; their last pushes may still arrive
        self._over = asyncio.Event()
        self._begun = False
        self._journal = Journal(Path(job.out) / "coordinator.json", job.name)
        self._unused = [0] * len(job.shards)  # by server: lost updates and refused gradients reported so far
        self._step = 0
        self._version = 0  # the version that the servers have, or have been ordered to make
        self._values: tuple[int, tuple[object, ...]] | None = None
        self._notes: dict[int, list[tuple[Note, Sequence[object]]]] = {}  # by worker: pushes that wait for their update
        self._tasks: defaultdict[int, TaskQueue[Task]] = defaultdict(TaskQueue)  # by worker: tasks to take
        self._buffers: dict[str, np.ndarray] = {}
        self._moments: dict[str, dict[str, Any]] = {}  # newest state of a worker's own optimizer
        self._saves = True  # whether a checkpoint may follow the steps in flight: workers then send optimizer state
        self._background: set[asyncio.Task[None]] = set()
        self._saving = asyncio.Lock()
        self._saved_step = -1
        self._finishing = False
        self._stopped = False
        self._error, self._of_loss = "", False
        self._rate = 0.0

    async def begin(self) -> int:
        """Give the servers their first values, or find out their position. Returns the number of steps done."""
        async with self._lock:
            if not self._begun:
                await self._begin()
                self._begun = True
        return self._step

    async def join(self, worker: int, fingerprint: Fingerprint) -> list[Task] | Refused:
        """Register a worker that is ready. Returns its first tasks once there are any; an empty list if the run is
        ending."""
        if why := self.job.fingerprint.difference(fingerprint):
            async with self._lock:
                self._metrics.event("refused", f"worker {worker} may not join: {why}", worker=worker)
            return Refused(f"worker {worker} has another model than this run: {why}")
        await self.begin()
        self._metrics.event("joined", f"worker {worker} has joined", self.consistency.started, worker=worker)
        async with self._lock:
            if not self._finishing:
                self._last_push[worker] = 0
                await self._handle(lambda: self.consistency.join(worker))
        found = [await self._next(worker) for _ in range(1 + self.job.plan.overlap)]
        return [task for task in found if task is not None]

    async def push(self, note: Note, gradients: Sequence[Any]) -> Task | None:
        """Handle a worker's gradient, given as one reference per server. Returns the worker's next task once it may go
        on; None if there is none."""
        await self.begin()
        async with self._lock:  # calls may overtake each other in transit
            await self._push_handled.wait_for(lambda: note.number <= self._last_push.get(note.worker, note.number) + 1)
            if not self._finishing and note.worker not in self._left:
                await self._handle(lambda: self._pushed(note, gradients))
            self._push_handled.notify_all()
        return None if note.worker in self._left else await self._next(note.worker)

    def _pushed(self, note: Note, gradients: Sequence[Any]) -> list[Decision]:
        worker = note.worker
        self._last_push[worker] = max(note.number, self._last_push.get(worker, 0))
        self._notes.setdefault(worker, []).append((note, gradients))
        self._handout.used(worker, note.piece)
        if note.buffers:
            self._buffers = note.buffers
        if note.moments:
            self._moments = note.moments
        if not math.isfinite(note.loss) and self.job.on_nan == "raise":
            self._of_loss = True
            self._error = (
                f"the loss of worker {worker} on values of version {note.base} is {note.loss}; lower the learning"
                " rate, set train.clip_norm, or train.on_nan = 'warn' to go on"
            )
            self._finish()
            return []
        return self.consistency.push(Push(worker, note.base, note.weight))

    async def again(self, worker: int, task: Task) -> Task | None:
        """Return a task once more, for a worker whose values were lost with a server or a coordinator."""
        await self.begin()
        if worker in self._left:
            return None
        async with self._lock:
            if not self._finishing:
                self._values = None
                if self._handout.holds(worker, task.piece):
                    return dataclasses.replace(task, version=self._version, values=self._read())
                self.consistency.adopt(worker)  # the task is from an earlier coordinator
                self._go([worker])
        return await self._next(worker)

    async def leave(self, worker: int, why: str, killed: bool = True) -> None:
        """Remove a worker. The pieces of data that it was working on go to other workers."""
        await self.begin()
        async with self._lock:
            pieces = self._handout.take_back(worker)
            batches = [piece // self.job.num_parts for piece in pieces]
            parts = ", ".join(f"{b} (part {p % self.job.num_parts})" for b, p in zip(batches, pieces, strict=True))
            goes = f"; what it had of batch {parts} goes to others" if pieces else ""
            text = f"worker {worker} is gone ({why}){goes}" if killed else f"worker {worker} has left{goes}"
            self._metrics.event("worker", text, worker=worker, batches=batches)
            self._left.add(worker)
            decisions = self.consistency.leave(worker)
            if not self._finishing:
                await self._carry_out(decisions)
            self._notes.pop(worker, None)
            self._write_journal()
            self._last_push.pop(worker, None)
            self._push_handled.notify_all()
            if worker in self._tasks:
                self._tasks.pop(worker).close()

    async def stop(self) -> None:
        """End the run after the step in flight, as if that step were the last."""
        await self.begin()
        self._stopped = True

    async def note(self, kind: str, message: str) -> None:
        """Record an event that another process observed."""
        await self.begin()
        self._metrics.event(kind, message)

    async def progress(self) -> Progress:
        """Return the progress of the run, and the messages since the last call."""
        await self.begin()
        messages, self._metrics.messages = tuple(self._metrics.messages), []
        num = len(self.consistency.clocks)
        return Progress(
            self._step, self._metrics.loss, self._metrics.tokens, num, self._rate, self._over.is_set(), messages
        )  # fmt: skip

    async def end(self) -> End:
        """Wait until the run is over and everything is written. Returns how it ended."""
        await self.begin()
        await self._over.wait()
        stopped = self._stopped and self._step < self.job.steps
        return End(self._step, self._metrics.loss, stopped, self._error, self._of_loss)

    async def totals(self) -> dict[str, int]:
        """Return the counts of lost updates and of late or refused gradients since this coordinator started."""
        await self.begin()
        return dict(self._metrics.totals)

    async def is_ending(self) -> bool:
        """Whether there are no more tasks."""
        return self._finishing

    def pid(self) -> int:
        """The id of this process."""
        return os.getpid()

    async def _begin(self) -> None:
        job = self.job
        self.consistency = make_consistency(job)
        standings: list[Standing] = await asyncio.gather(*(s.where.remote() for s in self._servers))
        self._full_model = await asyncio.to_thread(FullModel, job)
        came_back = all(standing.number >= 0 for standing in standings)
        if came_back:
            self._step = max(standing.step for standing in standings)
            self.consistency.version = max(standing.number for standing in standings)
            next_piece = max(standing.next_piece for standing in standings)
            self.consistency.started = True
            if (restored := self._journal.read()) is not None:
                members, self._unused = restored
                for worker in members:
                    self.consistency.adopt(worker)
        else:
            batch = await asyncio.to_thread(self._full_model.load) if job.resume else 0
            self._step = self._full_model.step
            self.consistency.version = self._step * self.consistency.updates_per_step
            next_piece = batch * job.num_parts
            start = Standing(self.consistency.version, self._step, next_piece)
            await asyncio.gather(
                *(
                    server.start.remote(self._full_model.values(pieces), self._full_model.state(index), start)
                    for index, (server, pieces) in enumerate(zip(self._servers, job.shards, strict=True))
                )
            )
        self._version = self.consistency.version
        self._handout = WorkQueue(next_piece, job.num_parts, job.steps_each)
        self._metrics = RunMetrics(job.out, job.make_log(self._step + 1))
        self._rate = self._full_model.rate(self._step)
        if came_back:
            self._metrics.event("coordinator", f"the coordinator came back, at update {self.consistency.version}")

    async def _handle(self, event: Callable[[], list[Decision]]) -> None:
        """Handle an event, and carry out the decisions that follow from it."""
        decisions = event()
        self._write_journal()
        await self._carry_out(decisions)

    async def _next(self, worker: int) -> Task | None:
        """The worker's next task. None is returned only after all updates are made, because a worker's pushed gradients
        are lost when its process ends."""
        if self._finishing:
            await self._over.wait()
            return None
        return await self._tasks[worker].get()

    async def _carry_out(self, decisions: Sequence[Decision]) -> None:
        ready: list[int] = []  # workers that go on together, between two updates
        for decision in decisions:
            if self._finishing:
                return
            if isinstance(decision, Go):
                ready.append(decision.worker)
                continue
            self._go(ready)
            ready = []
            if isinstance(decision, Commit):
                await self._commit(decision)
            elif isinstance(decision, Late):
                self._metrics.took(self._notes[decision.worker].pop(0)[0])
                self._metrics.count("late")
            elif isinstance(decision, Refuse):
                self._notes[decision.worker].pop()
                self._metrics.count("refused")
                self._metrics.event("refused", f"a push was refused: {decision.why}", worker=decision.worker)
                if Go(decision.worker) not in decisions:
                    self._tasks[decision.worker].close()
        self._go(ready)

    def _go(self, workers: Sequence[int]) -> None:
        """Give each of the workers its next task."""
        if self._finishing or not workers:
            return
        steps = self._steps_ahead()
        self._saves = not self.job.is_local or self._stopped or self._is_due(self._step, self._step + steps)
        for worker, piece, then in self._handout.give(workers):
            task = Task(self._version, piece, then, self._read(), self._step, steps, self._saves)
            self._tasks[worker].put(task)

    def _read(self) -> tuple[Any, ...]:
        """References to the values of the current version, shared by all workers that take them."""
        if self._values is None or self._values[0] != self._version:
            self._values = (self._version, tuple(server.read.remote() for server in self._servers))
        return self._values[1]

    async def _commit(self, commit: Commit) -> None:
        """Order the update from every server."""
        self._version = commit.number
        taken = [self._notes[worker].pop(0) for worker in commit.members]
        notes = [note for note, _ in taken]
        self._metrics.commit(commit, notes)
        members = tuple(
            Member(note.worker, note.number, share, note.base, note.job)
            for note, share in zip(notes, commit.shares, strict=True)
        )
        before, step = self._step, self._step + (self._steps_ahead() if commit.ends_step else 0)
        two_phase = self.job.clip_norm is not None and self.consistency.synchronous and not self.job.is_local
        order = UpdateOrder(commit.number, step, members, self._handout.next_piece, two_phase)
        pushes = [[gradients[index] for _, gradients in taken] for index in range(len(self._servers))]
        if two_phase:
            dones = [server.update.remote(order, each) for server, each in zip(self._servers, pushes, strict=True)]
            norm = math.sqrt(sum(done.square for done in await self._account(dones)))
            assert self.job.clip_norm is not None
            scale = min(1.0, self.job.clip_norm / (norm + 1e-6))
            for server in self._servers:
                server.finish.remote(commit.number, scale)
        else:  # the workers that pushed mostly read the values next
            both = [
                server.update_and_read.options(num_returns=2).remote(order, each)
                for server, each in zip(self._servers, pushes, strict=True)
            ]
            self._values = (commit.number, tuple(values for _, values in both))
            self._in_background(self._account([done for done, _ in both]))
        if commit.ends_step:
            self._step = step
            self._end_step(before)

    async def _account(self, dones: Sequence[Any]) -> list[UpdateDone]:
        """Wait for the servers' reports of an update; count and log what was lost or refused."""
        found: list[UpdateDone] = await asyncio.gather(*dones)
        refused: dict[tuple[int, str], list[int]] = {}
        for index, done in enumerate(found):
            for one in done.refused:
                refused.setdefault(one, []).append(index)
            lost = done.unused - self._unused[index] - len(done.refused)
            self._unused[index] = done.unused
            if lost or done.came_back:
                self._metrics.count("updates_lost", lost)
                how = "came back from its last snapshot" if done.came_back else "was not there for an update"
                self._metrics.event(
                    "server",
                    f"server {index} {how}: {lost} update{'s' * (lost != 1)} of its variables lost",
                    server=index,
                    updates_lost=lost,
                )
        for (worker, why), servers in refused.items():
            self._metrics.count("refused")
            self._metrics.event("refused", why, worker=worker, servers=servers)
        self._write_journal()
        return found

    def _steps_ahead(self) -> int:
        """The number of steps that the next update that ends a step covers."""
        return max(1, min(self.job.steps_each, self.job.steps - self._step))

    def _is_due(self, before: int, step: int) -> bool:
        """Whether a checkpoint is due after `step` steps, given that the previous update was after `before` steps."""
        every = [each for each in (self.job.save_every, self.job.evaluate_every) if each]
        return step >= self.job.steps or any(step // each > before // each for each in every)

    def _end_step(self, before: int) -> None:
        job, step = self.job, self._step
        last = step >= job.steps or (self._stopped and self._saves)
        self._rate = self._full_model.rate(step - 1)
        self._metrics.line(step, self._rate, len(self.consistency.clocks))
        if last or self._is_due(before, step):
            states = [server.state.remote() for server in self._servers]  # queued after this step's updates
            self._in_background(self._save(step, states))
        if last:
            self._finish()

    async def _save(self, step: int, states: Sequence[Any]) -> None:
        async with self._saving:
            found = await asyncio.gather(*states)
            try:
                await asyncio.to_thread(self._full_model.save, step, found, self._buffers, self._moments)
            except PlaitError as error:
                self._fail(str(error))
                return
            self._saved_step = step
        if self._evaluator is not None:
            evaluated = await self._evaluator.look.remote()
            if evaluated is not None:
                self._metrics.evaluated(*evaluated)

    def _fail(self, why: str) -> None:
        self._error = self._error or why
        self._finish()

    def _finish(self) -> None:
        """Give no more tasks. The run is over when the work in flight is done."""
        if self._finishing:
            return
        self._finishing = True
        asyncio.get_running_loop().create_task(self._close())

    async def _close(self) -> None:
        while self._background:
            await asyncio.gather(*self._background, return_exceptions=True)
        self._metrics.close()
        self._over.set()
        for tasks in self._tasks.values():
            tasks.close()

    def _in_background(self, work: Coroutine[object, object, object]) -> None:
        async def guarded() -> None:
            try:
                await work
            except CheckpointError as error:
                self._fail(str(error))
            except Exception as error:  # of the transport: an actor is gone for good
                self._fail(f"{type(error).__name__}: {error}")

        task = asyncio.get_running_loop().create_task(guarded())
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    def _write_journal(self) -> None:
        self._journal.write(sorted(self.consistency.clocks), self._unused)


class CoordinatorActor(Coordinator):
    """The coordinator as an actor. It is given actor names, so that a restarted one finds the other actors."""

    def __init__(self, job: Job, servers: Sequence[str], evaluator: str | None = None) -> None:
        import ray

        torch.set_num_threads(1)
        found = None if evaluator is None else ray.get_actor(evaluator)
        super().__init__(job, [ray.get_actor(name) for name in servers], found)
