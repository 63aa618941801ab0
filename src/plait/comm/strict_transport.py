"""A transport between threads that is as strict as NCCL, to find on a CPU what would deadlock or go wrong on GPUs.

A communicator runs its operations one after the other, on each rank in the order in which the rank calls them. A
collective begins once every rank of the group has it at the head of its queue; a message once the sender and the
receiver have it there, because nothing is buffered. Calls do not block, waits do. A group has one communicator for
collectives, and two for each pair of ranks that exchange messages, one for each direction, as ProcessGroupComm has.

An operation reads its inputs when it runs: a rank that changes one before it has waited sends wrong numbers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from plait.comm.monitor import ranks_text
from plait.comm.protocol import CHANNELS
from plait.comm.thread_transport import Combine, CommCall, Meeting, Meetings, Own, ThreadComm, ThreadWork, call_text
from plait.errors import WorldError

Communicator = tuple[str, tuple[int, ...]]  # the axis, and global ranks: of the group, or from sender to receiver
_MOST_SHOWN = 6  # operations of a queue in a message


@dataclass(eq=False)
class _Operation:
    """What one rank has called: an entry of its queue."""

    meeting: Meeting  # what the rank waits for
    rank: int
    ends: tuple[int, int] | None  # of a message: global ranks of the sender and the receiver
    tensor: Tensor
    combine: Combine
    own: Own

    def __str__(self) -> str:
        text = call_text(self.meeting.call)
        if self.ends is None:
            return text
        source, target = self.ends
        return f"{text} {f'to rank {target}' if self.rank == source else f'from rank {source}'}"


class Queues(Meetings):
    """The queues of all communicators among the ranks of one process. A deadlock ends all waits within a second."""

    look_around = 0.2
    channels = CHANNELS

    def __init__(self, num_ranks: int) -> None:
        super().__init__(num_ranks)
        self._queues: dict[Communicator, dict[int, deque[_Operation]]] = {}
        self._messages: dict[int, dict[int, CommCall]] = {
            rank: {} for rank in range(num_ranks)
        }  # not waited for, by rank

    def comm(self, ranks: tuple[int, ...], index: int, axis: str) -> StrictComm:
        return StrictComm(ranks, index, axis, self)

    def leave(self, rank: int) -> None:
        """Note that a rank has finished. It fails if it has not waited for a message: the memory of a tensor that it
        sends may be given to another tensor before it is sent."""
        if self.failure is None and self._messages[rank]:
            calls = ", ".join(sorted({call_text(call) for call in self._messages[rank].values()}))
            self.fail(rank, WorldError(f"rank {rank} finished and has not waited for {calls}"))
        super().leave(rank)

    def enqueue(
        self,
        communicator: Communicator,
        call: CommCall,
        rank: int,
        ends: tuple[int, int] | None,
        tensor: Tensor,
        combine: Combine,
        own: Own,
    ) -> Meeting:
        """Put an operation into the rank's queue of the communicator, and run all that can run now."""
        if not tensor.is_contiguous():
            raise WorldError(f"{call_text(call)} of rank {rank}: the input is not contiguous")
        with self._lock:
            if self.failure is not None:
                raise self.failure
            meeting = Meeting(call, (rank,))
            meeting.here.add(rank)
            queues = self._queues.setdefault(communicator, {each: deque() for each in communicator[1]})
            queues[rank].append(_Operation(meeting, rank, ends, tensor, combine, own))
            self._open[id(meeting)] = meeting
            if ends is not None:
                self._messages[rank][id(meeting)] = call
            self._advance(communicator, queues)
        return meeting

    def finish(self, meeting: Meeting, rank: int) -> Tensor:
        """Wait for an operation of this rank. Returns its result, which belongs to the rank."""
        self._messages[rank].pop(id(meeting), None)
        return self.take(id(meeting), meeting, rank, lambda result: result)

    def _advance(self, communicator: Communicator, queues: dict[int, deque[_Operation]]) -> None:
        """Run operations at the heads of queues until none can run."""
        waiting = [queue[0] for queue in queues.values() if queue]
        while waiting:
            head = waiting.pop()
            if head.meeting.done.is_set() or not queues[head.rank] or queues[head.rank][0] is not head:
                continue
            others = [queues[rank] for rank in communicator[1]]
            if not all(others):
                continue
            heads = [queue[0] for queue in others]
            self._run(heads)
            for queue in others:
                queue.popleft()
                waiting += [queue[0]] if queue else []

    def _run(self, heads: list[_Operation]) -> None:
        """Run one operation that all its ranks have at the head of a queue."""
        first = heads[0]
        error = ""
        for each in heads:
            if each.meeting.call != first.meeting.call:
                error = (
                    f"rank {first.rank} called {call_text(first.meeting.call)}, rank {each.rank}"
                    f" {call_text(each.meeting.call)}, as the next operation of one communicator"
                )
        result = None if error else first.combine([each.tensor for each in heads])
        for each in heads:
            if error:
                each.meeting.break_up(error)
            else:
                assert result is not None
                each.meeting.result = each.own(result)
                each.meeting.done.set()
            each.meeting.brought.clear()

    def _check_absent(self, meeting: Meeting) -> None:
        pass  # a rank that has finished may have operations in its queues; `_check_deadlock` tells

    def _check_deadlock(self, rank: int) -> None:
        with self._lock:
            waiting = dict(self._waiting)
            if len(waiting.keys() | self._left) < self._num_ranks or any(m.done.is_set() for m in waiting.values()):
                return
            if any(m.late is not None and not m.late() for m in waiting.values()):
                return
            lines = [f"rank {r} waits in {call_text(m.call)}{self._queues_text(r)}" for r, m in sorted(waiting.items())]
            if self._left:
                lines.append(f"{ranks_text(sorted(self._left))} finished")
            text = "no rank can go on, because a communicator runs operations in the order of their calls: "
            error = f"deadlock: {text}{'; '.join(lines)}"
            for meeting in waiting.values():
                meeting.break_up(error)

    def _queues_text(self, rank: int) -> str:
        """The operations that a rank has called and that have not run, by communicator."""
        found = []
        for queues in self._queues.values():
            if queue := queues.get(rank):
                shown = ", ".join(map(str, list(queue)[:_MOST_SHOWN]))
                found.append(shown + (f" and {len(queue) - _MOST_SHOWN} more" if len(queue) > _MOST_SHOWN else ""))
        return f" (queues: {' | '.join(found)})" if found else ""


class StrictComm(ThreadComm):
    """One group of ranks that are threads, with the three communicators that a group has on GPUs."""

    def __init__(self, ranks: tuple[int, ...], rank: int, axis: str, queues: Queues) -> None:
        super().__init__(ranks, rank, axis, queues)
        self._queues = queues

    def send(self, tensor: Tensor, to: int, tag: int = 0) -> ThreadWork:
        self.links.count(self.ranks[to], tensor.nbytes)
        return self._message(tensor.detach(), self.rank, to, tag)

    def recv(self, like: Tensor, source: int, tag: int = 0) -> ThreadWork:
        return self._message(torch.empty_like(like, memory_format=torch.contiguous_format), source, self.rank, tag)

    def _meet(
        self,
        name: str,
        detail: str,
        tensor: Tensor,
        combine: Combine,
        pick: int | None = None,
        own: Own = torch.clone,
        shape: tuple[int, ...] | None = None,
    ) -> ThreadWork:
        mine: Own = own if pick is None else lambda result: result[pick].clone()
        return self._enqueue((name, detail), None, tensor.detach(), combine, mine, shape)

    def _message(self, tensor: Tensor, source: int, to: int, tag: int) -> ThreadWork:
        ends = (self.ranks[source], self.ranks[to])
        own: Own = (lambda result: tensor) if self.rank == source else torch.clone
        combine: Callable[[list[Tensor]], Tensor] = lambda tensors: tensors[0]  # noqa: E731
        return self._enqueue(("send/recv", f"tag {tag}"), ends, tensor, combine, own)

    def _enqueue(
        self,
        what: tuple[str, str],
        ends: tuple[int, int] | None,
        tensor: Tensor,
        combine: Combine,
        own: Own,
        shape: tuple[int, ...] | None = None,
    ) -> ThreadWork:
        call = (*what, self._axis, tensor.dtype, tuple(tensor.shape) if shape is None else shape)
        me = self.ranks[self.rank]
        communicator = (self._axis, ends or self.ranks)
        meeting = self._queues.enqueue(communicator, call, me, ends, tensor, combine, own)
        return ThreadWork(lambda: self._queues.finish(meeting, me))
