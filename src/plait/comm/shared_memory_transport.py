"""The transport between processes of one host: collectives through shared memory, without a background thread.

Every rank has a segment. To start a collective it copies its tensor to a block of its own arena, describes it in its
header and raises its `posted` counter, all without blocking. A rank that waits, or that starts another collective,
advances all pending ones: once every peer has posted, it reads the peers' blocks, and when it is done with a collective
it raises its `consumed` counter. A block is free when all ranks have consumed it.

    2 ranks    each adds the peer's block to its own input
    3 or more  each rank sums one chunk, in rank order, in its own block, raises `reduced`, and reads the other chunks
               once all ranks have

Each byte thus crosses between two ranks as often as in a ring: 2(N-1)/N of the tensor per rank.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch

from plait.comm import shared_memory_collectives as collectives
from plait.comm.group import Done, GroupComm, chunk, row_bytes
from plait.comm.mailbox import Letter, Mailbox
from plait.comm.monitor import LateRanks, Monitor
from plait.comm.protocol import Take
from plait.comm.segment import Arena, Segment
from plait.comm.shared_memory_collectives import (
    CONSUMED,
    FAILED,
    MAIL,
    NUM_CALLS,
    POSTED,
    REDUCED,
    PeerWait,
    Reader,
    Steps,
    call_text,
    describe,
)
from plait.comm.sharing import share_file
from plait.errors import WorldError


class _Pending:
    """A collective that this rank has started."""

    __slots__ = ("awaits", "comm", "result", "seq", "steps")

    def __init__(self, comm: SharedMemoryComm, seq: int, steps: Steps) -> None:
        self.comm = comm
        self.seq = seq
        self.steps = steps
        self.awaits = next(steps)
        self.result: torch.Tensor | None = None

    def wait(self) -> torch.Tensor:
        if self.result is None:
            self.comm.wait_until(
                lambda: self.result is not None,
                lambda: self.comm.call_text(self.seq),
                lambda: self.comm.not_in(self.seq),
            )
            assert self.result is not None
        return self.result


class SharedMemoryComm(GroupComm):
    """One group of processes on one host.

    Args:
        ranks: global ranks of the group.
        rank: this rank's index among them.
        segments: the segment of each rank of the group.
        pids: the process of each rank of the group.
        limit: bytes of a rank's arena beyond which a collective waits for free blocks before it starts; a single
            tensor that is larger gets its block anyway.
        crowded: whether the host has more ranks than cores.
        monitor: this rank's monitor, which is told of long waits.
    """

    takes = True

    def __init__(
        self,
        ranks: tuple[int, ...],
        rank: int,
        segments: list[Segment],
        pids: list[int],
        limit: int,
        crowded: bool,
        monitor: Monitor | None = None,
    ) -> None:
        super().__init__(ranks, rank)
        self._own = segments[rank]
        self._segments = segments
        self._peers = [i for i in range(self.size) if i != rank]
        self._arena = Arena(self._own.arena_start, self._own.size)
        self._limit = limit
        self._num_started = 0
        self._pending: deque[_Pending] = deque()
        self._blocks: deque[tuple[int, int, int]] = deque()  # of unconsumed collectives: (seq, offset, bytes)
        self._buffers: dict[int, tuple[int, int]] = {}  # address -> (offset, bytes)
        self._error: WorldError | None = None
        self.siblings: list[SharedMemoryComm] = []  # this rank's other groups, which a long wait here must not hold up
        self._mailbox = Mailbox(self, segments, rank, MAIL)
        self._reader = Reader(self, segments)
        self._patience = PeerWait(ranks, self._peers, pids, self._needs, self._failed, crowded, monitor)

    # Comm's methods.

    def buffer(self, num_elements: int, dtype: torch.dtype) -> torch.Tensor | None:
        if num_elements == 0:
            return None
        offset = self.take_block(num_elements * dtype.itemsize)
        view = self._own.view(offset, num_elements, dtype)
        self._buffers[view.data_ptr()] = (offset, num_elements * dtype.itemsize)
        return view

    def shared(self, num_bytes: int) -> torch.Tensor | None:
        return share_file(self, num_bytes, torch.device("cpu"))

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum", *, consume: bool = False) -> _Pending:
        flat = tensor.detach().view(-1)
        block = self._buffers.pop(flat.data_ptr(), None) if self._buffers else None
        seq, offset = self._describe("all_reduce", op, flat, flat.nbytes, block)
        own = self._own.view(offset, flat.numel(), flat.dtype)
        into = flat if consume and block is None else None  # peers may still be reading the block
        if self.size == 2:
            if block is None:
                own.copy_(flat)
            return self._start(seq, collectives.add_peer(self._reader, seq, op, flat, into, tensor.shape))
        bounds = [chunk(flat.numel(), self.size, i) for i in range(self.size)]
        mine = slice(*bounds[self.rank])
        if block is None:
            own[: mine.start].copy_(flat[: mine.start])
            own[mine.stop :].copy_(flat[mine.stop :])
            term = flat[mine]
        else:
            term = flat[mine].clone()  # the sum overwrites its place in the block
        return self._start(seq, collectives.add_chunks(self._reader, seq, op, own, term, bounds, into, tensor.shape))

    def all_gather(self, tensor: torch.Tensor, *, take: Take | None = None) -> _Pending:
        flat = tensor.detach().view(-1)
        block = self._buffers.pop(flat.data_ptr(), None) if self._buffers else None
        seq, offset = self._describe("all_gather", "", flat, flat.nbytes, block)
        if block is None:
            self._own.view(offset, flat.numel(), flat.dtype).copy_(flat)
        return self._start(seq, collectives.gather(self._reader, seq, flat, tensor.shape, take))

    def reduce_scatter(self, tensor: torch.Tensor, op: str = "sum", *, consume: bool = False) -> _Pending:
        rows = tensor.detach().view(self.size, -1)
        seq = self._describe_rows("reduce_scatter", op, rows)
        return self._start(seq, collectives.add_rows(self._reader, seq, op, rows, tensor.shape[1:]))

    def all_to_all(self, tensor: torch.Tensor) -> _Pending:
        rows = tensor.detach().view(self.size, -1)
        seq = self._describe_rows("all_to_all", "", rows)
        return self._start(seq, collectives.exchange(self._reader, seq, rows, tensor.shape))

    def all_to_all_rows(self, tensor: torch.Tensor, counts: torch.Tensor) -> _Pending:
        sent, received = counts.tolist()
        self.count_rows(tensor, sent)
        rows = tensor.detach()[: sum(sent)]
        start, width = collectives.table_bytes(self.size), row_bytes(tensor) // tensor.element_size()
        form = tensor.new_empty(tensor.shape[1:], device="meta")  # what is the same on all ranks
        seq, offset = self._describe("all_to_all_rows", "", form, start + rows.nbytes)
        self._own.view(offset, self.size, torch.int64).copy_(counts[0])
        first, last = sum(sent[: self.rank]), sum(sent[: self.rank + 1])
        if rows.numel():
            own = self._own.view(offset + start, rows.numel(), rows.dtype).view(rows.shape)
            own[:first].copy_(rows[:first])
            own[last:].copy_(rows[last:])
        return self._start(seq, collectives.exchange_rows(self._reader, seq, rows[first:last], received, width))

    def broadcast(self, tensor: torch.Tensor, root: int) -> _Pending:
        flat = tensor.detach().view(-1)
        here = self.rank == root
        seq, offset = self._describe("broadcast", "", flat, flat.nbytes if here else 0, root=root)
        if here:
            self._own.view(offset, flat.numel(), flat.dtype).copy_(flat)
            for i in self._peers:
                self.links.count(self.ranks[i], flat.nbytes)
        return self._start(seq, collectives.take_from(self._reader, seq, root, flat, tensor.shape))

    def send(self, tensor: torch.Tensor, to: int, tag: int = 0) -> Done:
        self.links.count(self.ranks[to], tensor.nbytes)
        self._mailbox.send(tensor, to, tag)
        return Done(tensor)

    def recv(self, like: torch.Tensor, source: int, tag: int = 0) -> Letter:
        return self._mailbox.recv(like, source, tag)

    def barrier(self) -> None:
        nothing = torch.empty(0)
        seq, _ = self._describe("barrier", "", nothing, 0)
        self._start(seq, collectives.meet(self._reader, seq, nothing)).wait()

    def abort(self) -> None:
        """Tell the peers that this rank has failed, so that none waits for it."""
        self._own.words[FAILED] = 1

    def close(self) -> None:
        for segment in self._segments:
            segment.close()

    # Starting.

    def _describe(
        self,
        name: str,
        op: str,
        flat: torch.Tensor,
        num_bytes: int,
        block: tuple[int, int] | None = None,
        root: int = 0,
    ) -> tuple[int, int]:
        """Number the next collective, allocate a block that peers will read, and describe the collective. Returns
        (seq, offset)."""
        seq = self._num_started + 1
        if seq - self._least(CONSUMED) > NUM_CALLS:
            self.wait_until(lambda: seq - self._least(CONSUMED) <= NUM_CALLS)
        offset = 0
        if block is not None:
            offset, num_bytes = block
        elif num_bytes:
            offset = self.take_block(num_bytes)
        if num_bytes:
            self._blocks.append((seq, offset, num_bytes))
        self._num_started = seq
        describe(self._own.words, seq, name, op, flat, root, offset)
        return seq, offset

    def _describe_rows(self, name: str, op: str, rows: torch.Tensor) -> int:
        """Describe a tensor of which every rank reads its row, and copy in all rows but this rank's own."""
        block = self._buffers.pop(rows.data_ptr(), None) if self._buffers else None
        seq, offset = self._describe(name, op, rows, rows.nbytes, block)
        if block is not None:
            return seq
        own = self._own.view(offset, rows.numel(), rows.dtype).view(rows.shape)
        own[: self.rank].copy_(rows[: self.rank])
        own[self.rank + 1 :].copy_(rows[self.rank + 1 :])
        return seq

    def _start(self, seq: int, steps: Steps) -> _Pending:
        self._own.words[POSTED] = seq
        pending = _Pending(self, seq, steps)
        self._pending.append(pending)
        if len(self._pending) > 1:
            self.progress()
        return pending

    # Progress.

    def progress(self) -> None:
        """Advance every pending collective as far as possible without waiting."""
        if self._error is not None:
            raise self._error
        if self._pending:
            # The counters are read once for all: a later collective must never overtake an earlier one.
            raised = {POSTED: self._least(POSTED), REDUCED: self._least(REDUCED)}
            for pending in self._pending:
                while pending.result is None and raised[pending.awaits] >= pending.seq:
                    try:
                        pending.awaits = next(pending.steps)
                    except StopIteration as end:
                        pending.result = end.value
                    except WorldError as error:
                        self._error = error
                        raise
            while self._pending and self._pending[0].result is not None:
                self._own.words[CONSUMED] = self._pending.popleft().seq
        self._mailbox.progress()

    def wait_until(
        self, done: Callable[[], bool], what: Callable[[], str] = str, late: LateRanks | None = None
    ) -> None:
        """Make progress until `done()`. Raises RankFailed if a peer that is needed has failed or ended.

        `what()` names this wait in messages, and `late()` the ranks whose next call it is for.
        """
        self.progress()
        self._patience.begin(what, late)
        try:
            while not done():
                if self._patience.pause():
                    self._mailbox.read_all()
                    for other in self.siblings:
                        if other._error is None:  # an error is raised once
                            other.progress()
                        other._mailbox.read_all()
                self.progress()
        finally:
            self._patience.end()

    def call_text(self, seq: int) -> str:
        """This rank's call of collective `seq`, as text."""
        return call_text(self._own.words, seq)

    def not_in(self, seq: int) -> list[int]:
        """The ranks that have not called collective `seq`."""
        return [self.ranks[i] for i in self._peers if self._segments[i].words[POSTED] < seq]

    def _least(self, word: int) -> int:
        return min([self._segments[i].words[word] for i in self._peers])

    def _needs(self, i: int) -> bool:
        return self._segments[i].words[CONSUMED] < self._num_started or self._mailbox.needs(i)

    def _failed(self, i: int) -> bool:
        return self._segments[i].words[FAILED] != 0

    # Blocks.

    def take_block(self, num_bytes: int) -> int:
        """The offset of a free block of this rank's arena, which grows or, at its limit, waits for peers."""
        self._free_blocks()
        offset = self._arena.take(num_bytes)
        if offset is None and self._own.size + num_bytes > self._limit:

            def room_or_nothing_to_wait_for() -> bool:
                nonlocal offset
                in_use = self._free_blocks()
                offset = self._arena.take(num_bytes)
                return offset is not None or not in_use

            self.wait_until(room_or_nothing_to_wait_for)
        if offset is None:
            self._own.grow(self._own.size + max(self._own.size, 2 * num_bytes))
            self._arena.extend(self._own.size)
            offset = self._arena.take(num_bytes)
            assert offset is not None
        return offset

    def give_block(self, offset: int, num_bytes: int) -> None:
        self._arena.give(offset, num_bytes)

    def _free_blocks(self) -> bool:
        """Free the blocks that all ranks, this one included, have consumed. Returns whether any is still in use."""
        if self._blocks:
            consumed = min(self._least(CONSUMED), self._own.words[CONSUMED])
            while self._blocks and self._blocks[0][0] <= consumed:
                _, offset, num_bytes = self._blocks.popleft()
                self._arena.give(offset, num_bytes)
        return self._mailbox.free_blocks() or bool(self._blocks)
