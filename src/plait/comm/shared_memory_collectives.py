"""The collectives through shared memory: the header in which ranks describe them, and the steps of each.

A rank's header has its counters, and a description of each of its latest collectives. A collective is a generator,
which runs once the rank has described it. The generator yields the counter that all peers must have raised before it
may go on, and returns the result.

A wait for peers spins while it is short, then yields, then sleeps and checks on them. A peer that fails, or whose
process ends, while it is still needed ends the wait with RankFailed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Generator

import torch

from plait.comm.group import REDUCERS, GroupComm, reduce_terms
from plait.comm.mailbox import num_mail_words
from plait.comm.monitor import LateRanks, Monitor, Wait, timeout
from plait.comm.protocol import Take
from plait.comm.segment import DTYPE_CODES, DTYPES, Segment
from plait.comm.sharing import alive
from plait.errors import RankFailed, WorldError

_SPINS = 200  # about 50 us
_YIELD_SECONDS = 0.002
_SHORT_SLEEP, _LONG_SLEEP = 50e-6, 500e-6
_LOOK_SECONDS = 0.2


class PeerWait:
    """The waits of one rank in one group.

    `needs(i)` says whether this rank still waits for rank i, and `failed(i)` whether rank i has reported a failure.
    `monitor`, if given, is told of long waits.
    """

    def __init__(
        self,
        ranks: tuple[int, ...],
        peers: list[int],
        pids: list[int],
        needs: Callable[[int], bool],
        failed: Callable[[int], bool],
        crowded: bool,
        monitor: Monitor | None = None,
    ) -> None:
        self._monitor = monitor
        self._ranks, self._peers, self._pids = ranks, peers, pids
        self._needs, self._failed = needs, failed
        self._spins = 0 if crowded else _SPINS  # with more ranks than cores, spinning would keep a peer from running
        self._wait: Wait | None = None
        self.begin()

    def begin(self, what: Callable[[], str] = str, late: LateRanks | None = None) -> None:
        """Begin a wait. `what()` names it in messages, and `late()` the ranks that it is for, if they are known."""
        self._num_pauses = 0
        self._gone: int | None = None
        self._what, self._late = what, late

    def end(self) -> None:
        self._what, self._late = str, None  # they may hold a reference to the result
        if self._wait is not None and self._monitor is not None:
            self._monitor.end(self._wait)
            self._wait = None

    def pause(self) -> bool:
        """Pause, for longer the longer the wait has lasted. Returns whether the wait is long."""
        self._num_pauses += 1
        if self._num_pauses <= self._spins:
            return False
        if self._num_pauses == self._spins + 1:
            self._began = self._looked = time.monotonic()
        if self._num_pauses % 8 and self._num_pauses < self._spins + 2000:
            os.sched_yield()
            return False
        now = time.monotonic()
        if now - self._looked >= _LOOK_SECONDS:
            self._looked = now
            self._look_after_peers(now)
        waited = now - self._began
        if waited < _YIELD_SECONDS:
            os.sched_yield()
        else:
            time.sleep(_SHORT_SLEEP if waited < 0.1 else _LONG_SLEEP)
        return True

    def _look_after_peers(self, now: float) -> None:
        for i in self._peers:
            if self._failed(i):
                raise RankFailed(self._ranks[i], "it stopped the run")
        if self._gone is not None and self._needs(self._gone):
            raise self._why_gone(self._ranks[self._gone])
        # What a peer did just before it ended may be unread, so only a second look decides.
        self._gone = next((i for i in self._peers if self._needs(i) and not alive(self._pids[i])), None)
        if self._monitor is not None and self._late is not None:
            if self._wait is None:
                self._wait = self._monitor.begin(self._what(), self._late)
            self._wait.check()
        elif now - self._began > timeout():
            late = [self._ranks[i] for i in self._peers if self._needs(i)]
            raise WorldError(f"waited {timeout():.0f} s for ranks {late}, which live but do not come")

    def _why_gone(self, rank: int) -> WorldError:
        if self._monitor is not None:
            return self._monitor.why_gone(rank, self._what())
        return RankFailed(rank, "its process ended without a word (killed, or out of memory?)")


# Words of a header. Counters, which the owner writes and others poll, each on its own cache line:
POSTED, REDUCED, CONSUMED, FAILED = 0, 8, 16, 24
# Four words for each of the latest collectives: the call, number of elements, offset of the block, unused.
_CALLS = 32
NUM_CALLS = 256  # most collectives that may be unconsumed
MAIL = _CALLS + 4 * NUM_CALLS

_NAMES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "barrier", "all_to_all_rows")
_OPS = ("", "sum", "max", "min")
_FIRST_SIZE = 1 << 20


def num_words(size: int) -> int:
    """Number of words of a header, in a group of `size` ranks."""
    return MAIL + num_mail_words(size)


def create_segment(size: int) -> Segment:
    """This rank's segment for a group of `size` ranks. Raises OSError if the system provides none."""
    return Segment.create(num_words(size), _FIRST_SIZE)


def describe(words: memoryview, seq: int, name: str, op: str, flat: torch.Tensor, root: int, offset: int) -> None:
    """Describe collective `seq` in this rank's header; its block begins at `offset`."""
    at = _CALLS + 4 * (seq % NUM_CALLS)
    words[at] = ((root * 16 + DTYPE_CODES[flat.dtype]) * 4 + _OPS.index(op)) * 8 + _NAMES.index(name)
    words[at + 1] = flat.numel()
    words[at + 2] = offset


def offset_of(words: memoryview, own: memoryview, seq: int) -> int | None:
    """The offset of a peer's block for collective `seq`; None if the peer called another collective than this rank."""
    at = _CALLS + 4 * (seq % NUM_CALLS)
    if words[at] != own[at] or words[at + 1] != own[at + 1]:
        return None
    return words[at + 2]


def call_text(words: memoryview, seq: int) -> str:
    """The call of collective `seq`, as text for errors."""
    at = _CALLS + 4 * (seq % NUM_CALLS)
    rest, name = divmod(words[at], 8)
    rest, op = divmod(rest, 4)
    root, dtype = divmod(rest, 16)
    detail = _OPS[op] or (f"root {root}" if _NAMES[name] == "broadcast" else "")
    return f"{_NAMES[name]}({detail}) of {words[at + 1]} {str(DTYPES[dtype]).removeprefix('torch.')}"


Steps = Generator[int, None, torch.Tensor]


class Reader:
    """Reads the blocks of the other ranks, after it has checked that they called the same collective."""

    def __init__(self, group: GroupComm, segments: list[Segment]) -> None:
        self.segments = segments
        self.rank, self.size, self.ranks, self.links = group.rank, group.size, group.ranks, group.links
        self.peers = [i for i in range(group.size) if i != group.rank]

    def block(self, i: int, seq: int, num_elements: int, dtype: torch.dtype, start: int = 0) -> torch.Tensor:
        """The flat block of rank i for collective `seq`, from byte `start` on. Raises WorldError if that rank called
        another collective."""
        peer, own = self.segments[i].words, self.segments[self.rank].words
        offset = offset_of(peer, own, seq)
        if offset is None:
            here, there = self.ranks[self.rank], self.ranks[i]
            raise WorldError(f"rank {here} called {call_text(own, seq)}, rank {there} {call_text(peer, seq)}")
        return self.segments[i].view(offset + start, num_elements, dtype)

    def count(self, i: int, num_bytes: int) -> None:
        """Count bytes read from a peer as sent to it, because it reads as many from this rank."""
        self.links.count(self.ranks[i], num_bytes)


def add_peer(
    reader: Reader, seq: int, op: str, flat: torch.Tensor, into: torch.Tensor | None, shape: torch.Size
) -> Steps:
    """All-reduce of two ranks. Addition commutes, so both get the same bits."""
    yield POSTED
    (i,) = reader.peers
    theirs = reader.block(i, seq, flat.numel(), flat.dtype)
    reader.count(i, flat.nbytes)
    return REDUCERS[op](flat, theirs, out=into).view(shape)


def add_chunks(
    reader: Reader, seq: int, op: str, own: torch.Tensor, term: torch.Tensor, bounds: list[tuple[int, int]],
    into: torch.Tensor | None, shape: torch.Size,
) -> Steps:  # fmt: skip
    """All-reduce of three ranks or more: sum this rank's chunk in rank order, then read the other chunks."""
    yield POSTED
    blocks = [own if i == reader.rank else reader.block(i, seq, own.numel(), own.dtype) for i in range(reader.size)]
    start, end = bounds[reader.rank]
    terms = [term if i == reader.rank else blocks[i][start:end] for i in range(reader.size)]
    reduce_terms(terms, op, own[start:end])
    reader.segments[reader.rank].words[REDUCED] = seq
    yield REDUCED
    out = torch.empty_like(own) if into is None else into
    for i, (first, last) in enumerate(bounds):
        out[first:last].copy_(blocks[i][first:last])
        if i != reader.rank:
            reader.count(i, (end - start + last - first) * own.element_size())
    return out.view(shape)


def gather(reader: Reader, seq: int, flat: torch.Tensor, shape: torch.Size, take: Take | None) -> Steps:
    """All-gather: pass every rank's block to `take`, or stack the blocks."""
    yield POSTED
    if take is not None:
        for i in range(reader.size):
            take(i, flat if i == reader.rank else reader.block(i, seq, flat.numel(), flat.dtype))
            if i != reader.rank:
                reader.count(i, flat.nbytes)
        return flat
    out = flat.new_empty((reader.size, flat.numel()))
    out[reader.rank].copy_(flat)
    for i in reader.peers:
        out[i].copy_(reader.block(i, seq, flat.numel(), flat.dtype))
        reader.count(i, flat.nbytes)
    return out.view(reader.size, *shape)


def add_rows(reader: Reader, seq: int, op: str, rows: torch.Tensor, shape: torch.Size) -> Steps:
    """Reduce-scatter: sum row `rank` of every rank's block."""
    yield POSTED
    terms = [_row(reader, i, seq, rows) for i in range(reader.size)]
    return reduce_terms(terms, op, torch.empty_like(terms[0])).view(shape)


def exchange(reader: Reader, seq: int, rows: torch.Tensor, shape: torch.Size) -> Steps:
    """All-to-all: stack row `rank` of every rank's block."""
    yield POSTED
    out = torch.empty_like(rows)
    for i in range(reader.size):
        out[i].copy_(_row(reader, i, seq, rows))
    return out.view(shape)


def table_bytes(size: int) -> int:
    """Bytes of the numbers of rows for each of `size` ranks, which precede rows in a block."""
    return -(-8 * size // 64) * 64


def exchange_rows(reader: Reader, seq: int, mine: torch.Tensor, received: list[int], width: int) -> Steps:
    """All-to-all of rows of `width` elements: from every rank those after the ones for lower ranks. `mine` are this
    rank's own."""
    yield POSTED
    form = mine.shape[1:]
    out = mine.new_empty((sum(received), *form))
    for i, into in enumerate(out.split(received)):
        if i == reader.rank:
            into.copy_(mine)
            continue
        nums = reader.block(i, seq, reader.size, torch.int64).tolist()
        if nums[reader.rank] != len(into):
            here, there = reader.ranks[reader.rank], reader.ranks[i]
            raise WorldError(f"rank {here} expects {len(into)} rows, rank {there} sends {nums[reader.rank]}")
        if into.numel():
            start = table_bytes(reader.size) + sum(nums[: reader.rank]) * width * mine.element_size()
            into.copy_(reader.block(i, seq, into.numel(), mine.dtype, start).view(into.shape))
    return out


def take_from(reader: Reader, seq: int, root: int, flat: torch.Tensor, shape: torch.Size) -> Steps:
    """Broadcast."""
    yield POSTED
    found = flat if root == reader.rank else reader.block(root, seq, flat.numel(), flat.dtype)
    return found.clone().view(shape)


def meet(reader: Reader, seq: int, nothing: torch.Tensor) -> Steps:
    """Barrier."""
    yield POSTED
    for i in reader.peers:
        reader.block(i, seq, 0, nothing.dtype)
    return nothing


def _row(reader: Reader, i: int, seq: int, rows: torch.Tensor) -> torch.Tensor:
    if i == reader.rank:
        return rows[i]
    reader.count(i, rows[i].nbytes)
    return reader.block(i, seq, rows.numel(), rows.dtype).view(rows.shape)[reader.rank]
