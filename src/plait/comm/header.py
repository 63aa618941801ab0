"""The header of a rank's shared memory: its counters, and descriptions of its latest collectives."""

from __future__ import annotations

import torch

from plait.comm.mailbox import num_mail_words
from plait.comm.segment import DTYPE_CODES, DTYPES, Segment

# Counters that one rank writes and others poll, each on its own cache line.
POSTED, REDUCED, CONSUMED, FAILED = 0, 8, 16, 24
# Then four words for each of the latest collectives: the call, number of elements, offset of the block, unused.
_CALLS = 32
NUM_CALLS = 256  # the most collectives that may be unconsumed
MAIL = _CALLS + 4 * NUM_CALLS

_NAMES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "barrier")
_OPS = ("", "sum", "max", "min")
_FIRST_SIZE = 1 << 20


def num_words(size: int) -> int:
    """Words of a header, in a group of `size` ranks."""
    return MAIL + num_mail_words(size)


def create_segment(size: int) -> Segment:
    """This rank's segment for a group of `size` ranks. Raises OSError if the system provides none."""
    return Segment.create(num_words(size), _FIRST_SIZE)


def describe(words: memoryview, seq: int, name: str, op: str, flat: torch.Tensor, root: int, offset: int) -> None:
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
    at = _CALLS + 4 * (seq % NUM_CALLS)
    rest, name = divmod(words[at], 8)
    rest, op = divmod(rest, 4)
    root, dtype = divmod(rest, 16)
    detail = _OPS[op] or (f"root {root}" if _NAMES[name] == "broadcast" else "")
    return f"{_NAMES[name]}({detail}) of {words[at + 1]} {str(DTYPES[dtype]).removeprefix('torch.')}"
