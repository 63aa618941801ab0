"""Point-to-point messages through shared memory: the `send` and `recv` of the shared-memory transport.

A sender copies the tensor to a block of its own arena, describes it in a ring of letters that belongs to the pair of
ranks, and raises the pair's `sent` counter. The receiver reads letters in order, up to the last one that it has asked
for, and keeps messages with a tag that it has not asked for yet. It then raises its `received` counter, which frees the
sender's block. So a message that is sent long before it is needed takes memory of the sender only.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

import torch

from plait.comm.segment import DTYPE_CODES, DTYPES, Segment
from plait.errors import WorldError

_NUM_LETTERS = 32  # the most in flight from one rank to another
_LINE = 8  # words in a cache line


def num_mail_words(size: int) -> int:
    """Words that the mailbox of a rank takes of its header, in a group of `size` ranks."""
    return size * (2 * _LINE + 4 * _NUM_LETTERS)


class Letter:
    """The Work of a `recv`: a message that this rank has asked for."""

    def __init__(self, like: torch.Tensor, tag: int, source: int, wait_until: Callable[..., None]) -> None:
        self.tag = tag
        self._source = source
        self._like = (like.dtype, like.shape)
        self._wait_until = wait_until
        self._result: torch.Tensor | None = None
        self._error: WorldError | None = None

    def fill(self, flat: torch.Tensor, source: int) -> None:
        dtype, shape = self._like
        if flat.dtype != dtype or flat.numel() != shape.numel():
            self._error = WorldError(
                f"rank {source} sent {flat.numel()} elements of {flat.dtype}, but {list(shape)} of {dtype} was expected"
            )
        else:
            self._result = flat.view(shape)

    def wait(self) -> torch.Tensor:
        if self._result is None and self._error is None:
            self._wait_until(
                lambda: self._result is not None or self._error is not None,
                lambda: f"recv of {list(self._like[1])}",
                lambda: [self._source],
            )
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result


class Mailbox:
    """All messages from and to one rank of a group. `first_word` is where the mailbox begins in every header."""

    def __init__(self, comm: Any, segments: list[Segment], rank: int, first_word: int) -> None:
        self._comm = comm  # the SharedMemoryComm, which allocates blocks and waits
        self._segments = segments
        self._rank = rank
        self._sent_word = [first_word + _LINE * i for i in range(len(segments))]
        self._received_word = [first_word + _LINE * (len(segments) + i) for i in range(len(segments))]
        letters = first_word + 2 * _LINE * len(segments)
        self._letters = [letters + 4 * _NUM_LETTERS * i for i in range(len(segments))]
        self._num_sent = [0] * len(segments)
        self._num_received = [0] * len(segments)
        self._blocks: dict[int, deque[tuple[int, int, int]]] = {}  # by receiver: (number, offset, bytes)
        self._expected: dict[int, deque[Letter]] = {}  # by sender
        self._unasked: dict[tuple[int, int], deque[torch.Tensor]] = defaultdict(deque)  # by sender and tag

    def send(self, tensor: torch.Tensor, to: int, tag: int) -> None:
        flat = tensor.detach().view(-1)
        peer = self._segments[to].words
        number = self._num_sent[to] + 1
        if number - peer[self._received_word[self._rank]] > _NUM_LETTERS:
            self._comm.wait_until(lambda: number - peer[self._received_word[self._rank]] <= _NUM_LETTERS)
        own = self._segments[self._rank]
        offset = self._comm.take_block(flat.nbytes)
        own.view(offset, flat.numel(), flat.dtype).copy_(flat)
        at = self._letters[to] + 4 * (number % _NUM_LETTERS)
        own.words[at], own.words[at + 1] = tag, DTYPE_CODES[flat.dtype]
        own.words[at + 2], own.words[at + 3] = flat.numel(), offset
        own.words[self._sent_word[to]] = self._num_sent[to] = number
        self._blocks.setdefault(to, deque()).append((number, offset, flat.nbytes))

    def recv(self, like: torch.Tensor, source: int, tag: int) -> Letter:
        letter = Letter(like, tag, self._comm.ranks[source], self._comm.wait_until)
        if self._unasked and self._unasked[source, tag]:
            letter.fill(self._unasked[source, tag].popleft(), self._comm.ranks[source])
        else:
            self._expected.setdefault(source, deque()).append(letter)
            self._read(source)
        return letter

    def progress(self) -> None:
        """Read the messages that have arrived from ranks of which a message is expected."""
        for source in list(self._expected):
            self._read(source)

    def read_all(self) -> None:
        """Read all messages that have arrived, so that no sender waits for room."""
        for source in range(len(self._segments)):
            self._read(source, unasked=True)

    def needs(self, i: int) -> bool:
        """Whether rank i must still send or read a message."""
        return bool(self._expected.get(i) or self._blocks.get(i))

    def free_blocks(self) -> bool:
        """Free the blocks whose messages have been read. Returns whether any block is still in use."""
        for to, blocks in list(self._blocks.items()):
            received = self._segments[to].words[self._received_word[self._rank]]
            while blocks and blocks[0][0] <= received:
                _, offset, num_bytes = blocks.popleft()
                self._comm.give_block(offset, num_bytes)
            if not blocks:
                del self._blocks[to]
        return bool(self._blocks)

    def _read(self, source: int, unasked: bool = False) -> None:
        peer = self._segments[source]
        sent = peer.words[self._sent_word[self._rank]]
        while self._num_received[source] < sent and (unasked or source in self._expected):
            number = self._num_received[source] + 1
            at = self._letters[self._rank] + 4 * (number % _NUM_LETTERS)
            tag, code, num, offset = peer.words[at : at + 4]
            flat = peer.view(offset, num, DTYPES[code]).clone()
            self._num_received[source] = number
            self._segments[self._rank].words[self._received_word[source]] = number
            waiting = self._expected.get(source, deque())
            letter = next((letter for letter in waiting if letter.tag == tag), None)
            if letter is None:
                self._unasked[source, tag].append(flat)
                continue
            waiting.remove(letter)
            if not waiting:
                del self._expected[source]
            letter.fill(flat, self._comm.ranks[source])
