"""The coordinator: it decides which pushes make an update and who goes on, tells the servers, and writes checkpoints.

It holds no values, so that one that is killed loses none: the servers say where they are, and it carries on from there.
Every server gets its orders from here, in one order, so that a version of the run is the same on all of them.

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

from plait.errors import CheckpointError, PlaitError
from plait.integrations.servers.full_model import FullModel
from plait.integrations.servers.journal import Journal
from plait.integrations.servers.notes import End, Note, Progress, Refused, Task
from plait.integrations.servers.requests import Requests
from plait.integrations.servers.run_metrics import RunMetrics
from plait.integrations.servers.server import Member, Standing, UpdateDone, UpdateOrder
from plait.integrations.servers.service import Fingerprint, Job, agreement_of
from plait.schedule.consistency import Commit, Decision, Go, Late, Push, Refuse
from plait.schedule.work_queue import Handout


class Coordinator:
    """An asyncio actor. `servers` and `evaluator` are handles of actors, whose calls give references to await."""

    def __init__(self, job: Job, servers: Sequence[Any], evaluator: Any = None) -> None:
        self.job = job
        self._servers = list(servers)
        self._evaluator = evaluator
        self._lock = asyncio.Lock()  # events are taken one after the other
        self._turns = asyncio.Condition(self._lock)
        self._numbers: dict[int, int] = {}  # of workers, that of the last push that was taken
        self._left: set[int] = set()  # whose last pushes may still be on their way
        self._over = asyncio.Event()
        self._begun = False
        self._known = Journal(Path(job.out) / "coordinator.json", job.name)
        self._unused = [0] * len(job.shards)  # of each server, as far as it was said
        self._step = 0
        self._version = 0  # that the servers have, or are told to make
        self._values: tuple[int, tuple[Any, ...]] | None = None
        self._notes: dict[int, list[tuple[Note, Sequence[Any]]]] = {}  # pushes that wait for their update
        self._tasks: defaultdict[int, Requests[Task]] = defaultdict(Requests)  # for each worker to take
        self._buffers: dict[str, np.ndarray] = {}
        self._moments: dict[str, dict[str, Any]] = {}  # of a worker's own optimizer, as last heard of
        self._saves = True  # whether the steps under way may be the last ones: what is then saved is asked for
        self._background: set[asyncio.Task[None]] = set()
        self._saving = asyncio.Lock()
        self._saved_step = -1
        self._finishing = False
        self._stopped = False
        self._error, self._of_loss = "", False
        self._rate = 0.0

    async def begin(self) -> int:
        """Give the servers their first values, or find out where they are; returns the steps that are done."""
        async with self._lock:
            if not self._begun:
                await self._begin()
                self._begun = True
        return self._step

    async def join(self, worker: int, fingerprint: Fingerprint) -> list[Task] | Refused:
        """A worker is ready; returns once it has something to do. No tasks: there is nothing to do any more."""
        if why := self.job.fingerprint.difference(fingerprint):
            async with self._lock:
                self._tally.event("refused", f"worker {worker} may not join: {why}", worker=worker)
            return Refused(f"worker {worker} has another model than this run: {why}")
        await self.begin()
        self._tally.event("joined", f"worker {worker} has joined", self.agreement.started, worker=worker)
        async with self._lock:
            if not self._finishing:
                self._numbers[worker] = 0
                await self._take(lambda: self.agreement.join(worker))
        found = [await self._next(worker) for _ in range(1 + self.job.plan.overlap)]
        return [task for task in found if task is not None]

    async def push(self, note: Note, gradients: Sequence[Any]) -> Task | None:
        """A worker's gradient, one reference a server; returns its next task once it may go on."""
        await self.begin()
        async with self._lock:  # calls may overtake each other on their way here
            await self._turns.wait_for(lambda: note.number <= self._numbers.get(note.worker, note.number) + 1)
            if not self._finishing and note.worker not in self._left:
                await self._take(lambda: self._pushed(note, gradients))
            self._turns.notify_all()
        return None if note.worker in self._left else await self._next(note.worker)

    def _pushed(self, note: Note, gradients: Sequence[Any]) -> list[Decision]:
        worker = note.worker
        self._numbers[worker] = max(note.number, self._numbers.get(worker, 0))
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
        return self.agreement.push(Push(worker, note.base, note.weight))

    async def again(self, worker: int, task: Task) -> Task | None:
        """The same task once more, for a worker whose values went with a server or a coordinator."""
        await self.begin()
        if worker in self._left:
            return None
        async with self._lock:
            if not self._finishing:
                self._values = None
                if self._handout.holds(worker, task.piece):
                    return dataclasses.replace(task, version=self._version, values=self._read())
                self.agreement.adopt(worker)  # another coordinator gave it the task
                self._go([worker])
        return await self._next(worker)

    async def leave(self, worker: int, why: str, killed: bool = True) -> None:
        """A worker is gone. What it was working on goes to others."""
        await self.begin()
        async with self._lock:
            pieces = self._handout.take_back(worker)
            batches = [piece // self.job.num_parts for piece in pieces]
            parts = ", ".join(f"{b} (part {p % self.job.num_parts})" for b, p in zip(batches, pieces, strict=True))
            goes = f"; what it had of batch {parts} goes to others" if pieces else ""
            text = f"worker {worker} is gone ({why}){goes}" if killed else f"worker {worker} has left{goes}"
            self._tally.event("worker", text, worker=worker, batches=batches)
            self._left.add(worker)
            decisions = self.agreement.leave(worker)
            if not self._finishing:
                await self._carry_out(decisions)
            self._notes.pop(worker, None)
            self._write_known()
            self._numbers.pop(worker, None)
            self._turns.notify_all()
            if worker in self._tasks:
                self._tasks.pop(worker).close()

    async def stop(self) -> None:
        """End after the step that is under way, as if it were the last."""
        await self.begin()
        self._stopped = True

    async def note(self, kind: str, message: str) -> None:
        """An event that somebody else has seen."""
        await self.begin()
        self._tally.event(kind, message)

    async def progress(self) -> Progress:
        await self.begin()
        messages, self._tally.messages = tuple(self._tally.messages), []
        num = len(self.agreement.clocks)
        return Progress(
            self._step, self._tally.loss, self._tally.tokens, num, self._rate, self._over.is_set(), messages
        )  # fmt: skip

    async def end(self) -> End:
        """Returns when the run is over and everything is written."""
        await self.begin()
        await self._over.wait()
        stopped = self._stopped and self._step < self.job.steps
        return End(self._step, self._tally.loss, stopped, self._error, self._of_loss)

    async def totals(self) -> dict[str, int]:
        """Updates lost, gradients that came late or were refused, since this coordinator began."""
        await self.begin()
        return dict(self._tally.totals)

    async def is_ending(self) -> bool:
        """Whether there is nothing to do any more."""
        return self._finishing

    def pid(self) -> int:
        return os.getpid()

    async def _begin(self) -> None:
        job = self.job
        self.agreement = agreement_of(job)
        standings: list[Standing] = await asyncio.gather(*(s.where.remote() for s in self._servers))
        self._whole = await asyncio.to_thread(FullModel, job)
        came_back = all(standing.number >= 0 for standing in standings)
        if came_back:
            self._step = max(standing.step for standing in standings)
            self.agreement.version = max(standing.number for standing in standings)
            next_piece = max(standing.next_piece for standing in standings)
            self.agreement.started = True
            if (known := self._known.read()) is not None:
                members, self._unused = known
                for worker in members:
                    self.agreement.adopt(worker)
        else:
            batch = await asyncio.to_thread(self._whole.load) if job.resume else 0
            self._step = self._whole.step
            self.agreement.version = self._step * self.agreement.updates_per_step
            next_piece = batch * job.num_parts
            start = Standing(self.agreement.version, self._step, next_piece)
            await asyncio.gather(
                *(
                    server.start.remote(self._whole.values(pieces), self._whole.state(index), start)
                    for index, (server, pieces) in enumerate(zip(self._servers, job.shards, strict=True))
                )
            )
        self._version = self.agreement.version
        self._handout = Handout(next_piece, job.num_parts, job.steps_each)
        self._tally = RunMetrics(job.out, job.make_log(self._step + 1))
        self._rate = self._whole.rate(self._step)
        if came_back:
            self._tally.event("coordinator", f"the coordinator came back, at update {self.agreement.version}")

    async def _take(self, happen: Callable[[], list[Decision]]) -> None:
        """Take an event, and carry out what it decides."""
        decisions = happen()
        self._write_known()
        await self._carry_out(decisions)

    async def _next(self, worker: int) -> Task | None:
        """The worker's next task. The end comes once what it has pushed is used: its gradients go with its process."""
        if self._finishing:
            await self._over.wait()
            return None
        return await self._tasks[worker].get()

    async def _carry_out(self, decisions: Sequence[Decision]) -> None:
        goes: list[int] = []  # who goes on together, after one update and before another
        for decision in decisions:
            if self._finishing:
                return
            if isinstance(decision, Go):
                goes.append(decision.worker)
                continue
            self._go(goes)
            goes = []
            if isinstance(decision, Commit):
                await self._commit(decision)
            elif isinstance(decision, Late):
                self._tally.took(self._notes[decision.worker].pop(0)[0])
                self._tally.count("late")
            elif isinstance(decision, Refuse):
                self._notes[decision.worker].pop()
                self._tally.count("refused")
                self._tally.event("refused", f"a push was refused: {decision.why}", worker=decision.worker)
                if Go(decision.worker) not in decisions:
                    self._tasks[decision.worker].close()
        self._go(goes)

    def _go(self, workers: Sequence[int]) -> None:
        if self._finishing or not workers:
            return
        steps = self._steps_ahead()
        self._saves = not self.job.is_local or self._stopped or self._is_due(self._step, self._step + steps)
        for worker, piece, then in self._handout.give(workers):
            task = Task(self._version, piece, then, self._read(), self._step, steps, self._saves)
            self._tasks[worker].put(task)

    def _read(self) -> tuple[Any, ...]:
        """References to the values of this version, which all who take them share."""
        if self._values is None or self._values[0] != self._version:
            self._values = (self._version, tuple(server.read.remote() for server in self._servers))
        return self._values[1]

    async def _commit(self, commit: Commit) -> None:
        """Have every server make the update."""
        self._version = commit.number
        taken = [self._notes[worker].pop(0) for worker in commit.members]
        notes = [note for note, _ in taken]
        self._tally.commit(commit, notes)
        members = tuple(
            Member(note.worker, note.number, share, note.base, note.job)
            for note, share in zip(notes, commit.shares, strict=True)
        )
        before, step = self._step, self._step + (self._steps_ahead() if commit.ends_step else 0)
        two_phase = self.job.clip_norm is not None and self.agreement.synchronous and not self.job.is_local
        order = UpdateOrder(commit.number, step, members, self._handout.next_piece, two_phase)
        pushes = [[gradients[index] for _, gradients in taken] for index in range(len(self._servers))]
        if two_phase:
            dones = [server.update.remote(order, each) for server, each in zip(self._servers, pushes, strict=True)]
            norm = math.sqrt(sum(done.square for done in await self._account(dones)))
            assert self.job.clip_norm is not None
            scale = min(1.0, self.job.clip_norm / (norm + 1e-6))
            for server in self._servers:
                server.finish.remote(commit.number, scale)
        else:  # whoever pushed takes the values next, mostly
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
        """What came of an update: what was lost and refused is counted and said."""
        found: list[UpdateDone] = await asyncio.gather(*dones)
        refused: dict[tuple[int, str], list[int]] = {}
        for index, done in enumerate(found):
            for one in done.refused:
                refused.setdefault(one, []).append(index)
            lost = done.unused - self._unused[index] - len(done.refused)
            self._unused[index] = done.unused
            if lost or done.came_back:
                self._tally.count("updates_lost", lost)
                how = "came back from its last snapshot" if done.came_back else "was not there for an update"
                self._tally.event(
                    "server",
                    f"server {index} {how}: {lost} update{'s' * (lost != 1)} of its variables lost",
                    server=index,
                    updates_lost=lost,
                )
        for (worker, why), servers in refused.items():
            self._tally.count("refused")
            self._tally.event("refused", why, worker=worker, servers=servers)
        self._write_known()
        return found

    def _steps_ahead(self) -> int:
        """The steps that the next update, of those that end one, is made of."""
        return max(1, min(self.job.steps_each, self.job.steps - self._step))

    def _is_due(self, before: int, step: int) -> bool:
        """Whether a checkpoint is to be written after `step` steps, where the update before was after `before`."""
        every = [each for each in (self.job.save_every, self.job.evaluate_every) if each]
        return step >= self.job.steps or any(step // each > before // each for each in every)

    def _end_step(self, before: int) -> None:
        job, step = self.job, self._step
        last = step >= job.steps or (self._stopped and self._saves)
        self._rate = self._whole.rate(step - 1)
        self._tally.line(step, self._rate, len(self.agreement.clocks))
        if last or self._is_due(before, step):
            states = [server.state.remote() for server in self._servers]  # behind this step's updates, before others
            self._in_background(self._save(step, states))
        if last:
            self._finish()

    async def _save(self, step: int, states: Sequence[Any]) -> None:
        async with self._saving:
            found = await asyncio.gather(*states)
            try:
                await asyncio.to_thread(self._whole.save, step, found, self._buffers, self._moments)
            except PlaitError as error:
                self._fail(str(error))
                return
            self._saved_step = step
        if self._evaluator is not None:
            evaluated = await self._evaluator.look.remote()
            if evaluated is not None:
                self._tally.evaluated(*evaluated)

    def _fail(self, why: str) -> None:
        self._error = self._error or why
        self._finish()

    def _finish(self) -> None:
        """No worker gets anything to do any more; the run is over when what is under way is done."""
        if self._finishing:
            return
        self._finishing = True
        asyncio.get_running_loop().create_task(self._close())

    async def _close(self) -> None:
        while self._background:
            await asyncio.gather(*self._background, return_exceptions=True)
        self._tally.close()
        self._over.set()
        for tasks in self._tasks.values():
            tasks.close()

    def _in_background(self, work: Coroutine[Any, Any, Any]) -> None:
        async def guarded() -> None:
            try:
                await work
            except CheckpointError as error:
                self._fail(str(error))
            except Exception as error:  # of the transport: somebody is gone for good
                self._fail(f"{type(error).__name__}: {error}")

        task = asyncio.get_running_loop().create_task(guarded())
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    def _write_known(self) -> None:
        self._known.write(sorted(self.agreement.clocks), self._unused)
