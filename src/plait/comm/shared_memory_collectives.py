"""The collectives through shared memory: the header in which ranks describe them, and the steps of each.

A rank's header has its counters, and a description of each of its latest collectives. A collective is a generator,
which runs once the rank has described it. The generator yields the counter that all peers must have raised before it
may go on, and returns the result.
"""

from __future__ import annotations

from collections.abc import Generator

import torch

from plait.comm.group import REDUCERS, GroupComm, reduce_terms
from plait.comm.mailbox import num_mail_words
from plait.comm.protocol import Take
from plait.comm.segment import DTYPE_CODES, DTYPES, Segment
from plait.errors import WorldError

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
