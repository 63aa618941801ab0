"""The transport between ranks that are threads: one `Meeting` per collective, and the Comm that uses them."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from plait.comm.group import Done, GroupComm, reduce_terms
from plait.comm.key_value_store import LocalStore
from plait.comm.monitor import ranks_text, timeout
from plait.comm.protocol import Take, Work
from plait.errors import RankFailed, WorldError

CommCall = tuple[Any, ...]  # name, detail, axis, dtype, shape: equal on all ranks of a collective
Combine = Callable[[list[torch.Tensor]], torch.Tensor]
Own = Callable[[torch.Tensor], torch.Tensor]


class Meeting:
    """One collective: the input of each rank, and the result."""

    __slots__ = ("brought", "call", "done", "error", "here", "late", "num_left", "ranks", "result", "since")

    def __init__(self, call: CommCall, ranks: tuple[int, ...]) -> None:
        self.call = call
        self.ranks = ranks
        self.here: set[int] = set()
        self.brought: dict[int, torch.Tensor] = {}  # by index in the group
        self.num_left = len(ranks)  # that have yet to take the result
        self.done = threading.Event()
        self.result: torch.Tensor | None = None
        self.error: WorldError | None = None
        self.late: Callable[[], Sequence[int]] | None = None  # for a wait for notes: the ranks waited for
        self.since = time.monotonic()

    def absent(self) -> list[int]:
        if self.late is not None:
            return list(self.late())
        return [rank for rank in self.ranks if rank not in self.here]

    def break_up(self, text: str) -> None:
        self.error = WorldError(text)
        self.done.set()


class Meetings:
    """All collectives in flight among the ranks of one process, and the first failure."""

    look_around = 2.0  # seconds that a rank waits before it checks for a deadlock
    channels: tuple[str, ...] = ()  # those that have communicators of their own

    def __init__(self, num_ranks: int) -> None:
        self.store = LocalStore()
        self.failure: RankFailed | None = None
        self.message = ""
        self.cause: BaseException | None = None
        self._num_ranks = num_ranks
        self._lock = threading.Lock()
        self._open: dict[Hashable, Meeting] = {}
        self._left: set[int] = set()
        self._waiting: dict[int, Meeting] = {}

    def comm(self, ranks: tuple[int, ...], index: int, axis: str) -> ThreadComm:
        """The Comm of the rank with this index among the global `ranks` of a group along an axis."""
        return ThreadComm(ranks, index, axis, self)

    def fail(self, rank: int, error: BaseException) -> None:
        """Record the first failure and wake all ranks."""
        with self._lock:
            if self.failure is not None:
                return
            self.message = f"{type(error).__name__}: {error}"
            self.cause = error
            self.failure = RankFailed(rank, self.message)
            for meeting in self._open.values():
                meeting.done.set()
        self.store.stop(self.failure)

    def leave(self, rank: int) -> None:
        """Note that a rank has finished; waits for it end with an error."""
        with self._lock:
            self._left.add(rank)
            for meeting in self._open.values():
                self._check_absent(meeting)

    def bring(self, key: Hashable, call: CommCall, ranks: tuple[int, ...], index: int, tensor: torch.Tensor,
              combine: Combine) -> Meeting:  # fmt: skip
        """Join a meeting with a tensor. The last rank to join computes the result."""
        with self._lock:
            meeting = self._open.get(key)
            if meeting is None:
                meeting = self._open[key] = Meeting(call, ranks)
            if self.failure is not None:
                raise self.failure
            if meeting.call != call:
                other = min(meeting.here)
                meeting.break_up(
                    f"rank {other} called {call_text(meeting.call)}, rank {ranks[index]} {call_text(call)}"
                )
            if meeting.error is not None:
                raise meeting.error
            meeting.brought[index] = tensor
            meeting.here.add(ranks[index])
            last = len(meeting.here) == len(ranks)
            self._check_absent(meeting)
        if last:
            meeting.result = combine([meeting.brought[i] for i in range(len(ranks))])
            meeting.brought.clear()
            meeting.done.set()
        return meeting

    def take(self, key: Hashable, meeting: Meeting, rank: int, own: Own = torch.clone) -> torch.Tensor:
        """Wait for the result. `own` makes from it a tensor that this rank may change, before others change theirs."""
        if not meeting.done.is_set():
            self._waiting[rank] = meeting
            while not meeting.done.wait(self.look_around):
                self._check_deadlock(rank)
            self._waiting.pop(rank, None)
        if meeting.error is not None:
            raise meeting.error
        if meeting.result is None:
            assert self.failure is not None
            raise self.failure
        with self._lock:
            last = meeting.num_left == 1
        result = meeting.result if last and own is torch.clone else own(meeting.result)
        self.let_go(key, meeting)
        return result

    def let_go(self, key: Hashable, meeting: Meeting) -> None:
        """Note that one rank less needs the result."""
        with self._lock:
            meeting.num_left -= 1
            if meeting.num_left == 0:
                del self._open[key]

    @contextmanager
    def waiting(self, rank: int, what: str, late: Callable[[], Sequence[int]]) -> Iterator[NotesWait]:
        """Within the context a rank waits for notes of others in the key-value store."""
        meeting = Meeting((what,), (rank,))
        meeting.late = late
        self._waiting[rank] = meeting
        try:
            yield NotesWait(self, rank, meeting)
        finally:
            self._waiting.pop(rank, None)

    def check_notes(self, rank: int, meeting: Meeting) -> None:
        """Raise if a wait for notes cannot end, or has timed out."""
        if meeting.error is not None:
            raise meeting.error
        absent = meeting.absent()
        if gone := [other for other in absent if other in self._left]:
            if not [other for other in meeting.absent() if other in gone]:
                return  # it left its note before it finished
            raise WorldError(f"{ranks_text(gone)} finished while rank {rank} waited in {call_text(meeting.call)}")
        if time.monotonic() - meeting.since > self.look_around:
            self._check_deadlock(rank)
        if time.monotonic() - meeting.since > timeout():
            raise WorldError(
                f"rank {rank} waited {timeout():.0f} s for {ranks_text(absent)} in {call_text(meeting.call)}"
            )

    def _check_absent(self, meeting: Meeting) -> None:
        if gone := [rank for rank in meeting.absent() if rank in self._left]:
            here = ranks_text(sorted(meeting.here))
            meeting.break_up(f"{ranks_text(gone)} finished while {here} waited in {call_text(meeting.call)}")

    def _check_deadlock(self, rank: int) -> None:
        with self._lock:
            waiting = dict(self._waiting)
            if len(waiting) + len(self._left) < self._num_ranks or any(m.done.is_set() for m in waiting.values()):
                return
            if any(not m.absent() for m in waiting.values()):
                return
            lines = "; ".join(
                f"rank {r} in {call_text(m.call)} for {ranks_text(m.absent())}" for r, m in sorted(waiting.items())
            )
            waiting[rank].break_up(f"all ranks wait for each other: {lines}")


class NotesWait:
    """A rank's wait for notes of other ranks."""

    def __init__(self, meetings: Meetings, rank: int, meeting: Meeting) -> None:
        self._meetings, self._rank, self._meeting = meetings, rank, meeting

    def check(self) -> None:
        self._meetings.check_notes(self._rank, self._meeting)


class ThreadWatch:
    """The RankMonitor of a rank that is a thread."""

    def __init__(self, meetings: Meetings, rank: int) -> None:
        self._meetings, self._rank = meetings, rank
        self.num_steps = 0

    def does(self, what: str) -> None:
        pass

    def waiting(self, what: str, late: Callable[[], Sequence[int]]) -> AbstractContextManager[NotesWait]:
        return self._meetings.waiting(self._rank, what, late)

    def behind_step(self, step: int) -> list[int]:
        return []


class ThreadWork:
    """A collective among threads that this rank has joined."""

    def __init__(self, finish: Callable[[], torch.Tensor]) -> None:
        self._finish = finish
        self._result: torch.Tensor | None = None

    def wait(self) -> torch.Tensor:
        if self._result is None:
            self._result = self._finish()
        return self._result


def taking(work: Work, take: Take) -> ThreadWork:
    """Work of an all-gather that calls `take` with each row when it is waited for."""

    def finish() -> torch.Tensor:
        rows: torch.Tensor = work.wait()
        for rank, row in enumerate(rows):
            take(rank, row.reshape(-1))
        return rows

    return ThreadWork(finish)


class ThreadComm(GroupComm):
    """One group of ranks that are threads of this process."""

    def __init__(self, ranks: tuple[int, ...], rank: int, axis: str, meetings: Meetings) -> None:
        super().__init__(ranks, rank)
        self._axis = axis
        self._meetings = meetings
        self._num_calls: Counter[Hashable] = Counter()

    def shared(self, num_bytes: int) -> torch.Tensor:
        form = torch.empty(num_bytes, dtype=torch.uint8, device="meta")
        make: Combine = lambda _: torch.zeros(num_bytes, dtype=torch.uint8)  # noqa: E731
        return self._meet("shared", "", form, make, own=_as_it_is).wait()

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum", *, consume: bool = False) -> ThreadWork:
        self.count_ring_all_reduce(tensor)
        return self._meet("all_reduce", op, tensor, lambda tensors: reduce_terms(tensors, op))

    def all_gather(self, tensor: torch.Tensor, *, take: Take | None = None) -> ThreadWork:
        self.count_ring(tensor.nbytes * (self.size - 1))
        work = self._meet("all_gather", "", tensor, torch.stack)
        return work if take is None else taking(work, take)

    def reduce_scatter(self, tensor: torch.Tensor, op: str = "sum", *, consume: bool = False) -> ThreadWork:
        self.count_ring(tensor.nbytes // self.size * (self.size - 1))
        return self._meet("reduce_scatter", op, tensor, lambda tensors: reduce_terms(tensors, op), pick=self.rank)

    def all_to_all(self, tensor: torch.Tensor) -> ThreadWork:
        for rank in self.ranks:
            if rank != self.ranks[self.rank]:
                self.links.count(rank, tensor.nbytes // self.size)
        return self._meet("all_to_all", "", tensor, lambda tensors: torch.stack(tensors, 1), pick=self.rank)

    def all_to_all_rows(self, tensor: torch.Tensor, counts: torch.Tensor) -> ThreadWork:
        sent, received = counts.tolist()
        self.count_rows(tensor, sent)
        table = self._meet("all_to_all_rows", "counts", counts[0], torch.stack)
        form = (0, *tensor.shape[1:])
        work = self._meet("all_to_all_rows", "", tensor[: sum(sent)], torch.cat, own=_as_it_is, shape=form)

        def finish() -> torch.Tensor:
            nums = table.wait()
            assert nums[:, self.rank].tolist() == received, "ranks count rows differently"
            starts = (nums.flatten().cumsum(0) - nums.flatten()).view_as(nums)[:, self.rank].tolist()
            rows = work.wait()
            return torch.cat([rows[start : start + num] for start, num in zip(starts, received, strict=True)])

        return ThreadWork(finish)

    def broadcast(self, tensor: torch.Tensor, root: int) -> ThreadWork:
        self.count_broadcast(tensor, root)
        return self._meet("broadcast", f"root {root}", tensor, lambda tensors: tensors[root].clone())

    def send(self, tensor: torch.Tensor, to: int, tag: int = 0) -> Work:
        self.links.count(self.ranks[to], tensor.nbytes)
        self._pass(tensor.detach().clone(), self.rank, to, tag)
        return Done(tensor)

    def recv(self, like: torch.Tensor, source: int, tag: int = 0) -> ThreadWork:
        key, meeting = self._pass(like, source, self.rank, tag)
        me = self.ranks[self.rank]
        return ThreadWork(lambda: self._meetings.take(key, meeting, me))

    def barrier(self) -> None:
        self._meet("barrier", "", torch.empty(0), lambda tensors: tensors[0]).wait()

    def _meet(
        self,
        name: str,
        detail: str,
        tensor: torch.Tensor,
        combine: Combine,
        pick: int | None = None,
        own: Own = torch.clone,
        shape: tuple[int, ...] | None = None,
    ) -> ThreadWork:
        """Join a collective. All ranks bring tensors of one shape, or name the same `shape`."""
        tensor = tensor.detach()
        key = (self.ranks, self._axis, self._num_calls[""])
        self._num_calls[""] += 1
        call = (name, detail, self._axis, tensor.dtype, tuple(tensor.shape) if shape is None else shape)
        meetings = self._meetings
        meeting = meetings.bring(key, call, self.ranks, self.rank, tensor, combine)

        def finish() -> torch.Tensor:
            mine: Own = own if pick is None else lambda result: result[pick].clone()
            return meetings.take(key, meeting, self.ranks[self.rank], mine)

        return ThreadWork(finish)

    def _pass(self, tensor: torch.Tensor, source: int, to: int, tag: int) -> tuple[Hashable, Meeting]:
        """Join the meeting of a message with its key; only the sender's tensor counts."""
        pair = (source, to, tag)
        key = (self.ranks, self._axis, pair, self._num_calls[pair])
        self._num_calls[pair] += 1
        call = ("send/recv", f"tag {tag}", self._axis, tensor.dtype, tuple(tensor.shape))
        ends = (self.ranks[source], self.ranks[to])
        index = 0 if self.rank == source else 1
        meeting = self._meetings.bring(key, call, ends, index, tensor, lambda tensors: tensors[0])
        if index == 0:
            self._meetings.let_go(key, meeting)
        return key, meeting


def _as_it_is(result: torch.Tensor) -> torch.Tensor:
    return result


def call_text(call: CommCall) -> str:
    if len(call) == 1:
        return str(call[0])
    name, detail, axis, dtype, shape = call
    where = f" over {axis}" if axis else ""
    return f"{name}({detail}){where} of {str(dtype).removeprefix('torch.')}{list(shape)}"
