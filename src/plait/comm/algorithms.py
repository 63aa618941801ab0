"""All-reduce algorithms that a plan can name (`allreduce=ring`), written with the send and recv of any transport.

backend   the transport's own algorithm
ring      N-1 rounds that add a chunk and pass it on, N-1 that pass on the sums; a rank sends 2(N-1)/N of the bytes
naive     every rank sends its tensor to every other and adds; a rank sends N-1 times the bytes; for teaching
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator

import torch

from plait.comm.group import HALF, REDUCERS, chunk, reduce_terms
from plait.comm.protocol import Comm, Links, Take, Work
from plait.errors import PlanError

_TAG = 1 << 20  # above the tags that schedules use
_NUM_TAGS = 1 << 10

Rounds = Generator[None, None, torch.Tensor]  # yields once each round has started, returns the result


def choose(comm: Comm, algorithm: str) -> Comm:
    """The same group with its all_reduce by the algorithm of that name. Raises PlanError for an unknown name."""
    if algorithm == "backend":
        return comm
    if algorithm not in _ALGORITHMS:
        raise PlanError(f"allreduce={algorithm} is unknown; choose backend, {' or '.join(_ALGORITHMS)}")
    return _WithAlgorithm(comm, _ALGORITHMS[algorithm])


def _ring(comm: Comm, tensor: torch.Tensor, op: str, consume: bool, tag: int) -> Rounds:
    rank, size = comm.rank, comm.size
    result = tensor if consume else tensor.clone()
    flat = result.view(-1)
    total = flat.float() if flat.dtype in HALF and size > 2 else flat  # one addition rounds once in any dtype
    bounds = [slice(*chunk(flat.numel(), size, i)) for i in range(size)]
    sums, chunks = [total[each] for each in bounds], [flat[each] for each in bounds]
    for round_ in range(size - 1):  # each chunk collects one more rank's term as it travels
        out, into = sums[(rank - round_) % size], sums[(rank - round_ - 1) % size]
        received = _swap(comm, out, into, 1, tag)
        yield
        REDUCERS[op](received.wait(), into, out=into)
    if total is not flat:
        flat.copy_(total)
    for round_ in range(size - 1):  # each finished chunk is passed on
        out, into = chunks[(rank + 1 - round_) % size], chunks[(rank - round_) % size]
        received = _swap(comm, out, into, 1, tag)
        yield
        into.copy_(received.wait())
    return result


def _naive(comm: Comm, tensor: torch.Tensor, op: str, consume: bool, tag: int) -> Rounds:
    terms = {comm.rank: tensor}
    works = {(comm.rank - step) % comm.size: _swap(comm, tensor, tensor, step, tag) for step in range(1, comm.size)}
    yield
    terms.update((source, work.wait()) for source, work in works.items())
    result = tensor if consume else torch.empty_like(tensor)
    return result.copy_(reduce_terms([terms[source] for source in range(comm.size)], op))


def _swap(comm: Comm, out: torch.Tensor, into: torch.Tensor, step: int, tag: int) -> _Swap:
    """Send to the rank `step` above and receive from the rank `step` below.

    In every cycle of ranks some send first and some receive first, for transports that process messages in order.
    """
    to, source = (comm.rank + step) % comm.size, (comm.rank - step) % comm.size
    if (comm.rank // step) % 2 == 0:
        sent = comm.send(out, to, tag)
        return _Swap(sent, comm.recv(into, source, tag))
    received = comm.recv(into, source, tag)
    return _Swap(comm.send(out, to, tag), received)


class _Swap:
    def __init__(self, sent: Work, received: Work) -> None:
        self._sent, self._received = sent, received

    def wait(self) -> torch.Tensor:
        self._sent.wait()
        return self._received.wait()


_ALGORITHMS: dict[str, Callable[[Comm, torch.Tensor, str, bool, int], Rounds]] = {"ring": _ring, "naive": _naive}


class _Running:
    """An all-reduce in progress, whose remaining rounds run when anyone waits for it."""

    def __init__(self, queue: deque[_Running], rounds: Rounds) -> None:
        self._queue = queue
        self._rounds = rounds
        self._result: torch.Tensor | None = None
        next(rounds)
        queue.append(self)

    def wait(self) -> torch.Tensor:
        while self._result is None:  # in the order of starting, because peers may wait in another order
            self._queue[0]._finish()
            self._queue.popleft()
        return self._result

    def _finish(self) -> None:
        try:
            while True:
                next(self._rounds)
        except StopIteration as end:
            self._result = end.value


class _WithAlgorithm:
    """A Comm that overrides all_reduce and delegates everything else."""

    def __init__(self, comm: Comm, algorithm: Callable[[Comm, torch.Tensor, str, bool, int], Rounds]) -> None:
        self._comm = comm
        self._algorithm = algorithm
        self._queue: deque[_Running] = deque()
        self._num_calls = 0
        self.rank, self.size = comm.rank, comm.size
        self.links: Links = comm.links
        self.takes = comm.takes

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum", *, consume: bool = False) -> Work:
        self._num_calls += 1
        tag = _TAG + self._num_calls % _NUM_TAGS
        return _Running(self._queue, self._algorithm(self._comm, tensor.detach(), op, consume, tag))

    def buffer(self, num_elements: int, dtype: torch.dtype) -> torch.Tensor | None:
        return None  # tensors are sent in pieces, so a buffer would save no copy

    def shared(self, num_bytes: int) -> torch.Tensor | None:
        return self._comm.shared(num_bytes)

    def all_gather(self, tensor: torch.Tensor, *, take: Take | None = None) -> Work:
        return self._comm.all_gather(tensor, take=take)

    def reduce_scatter(self, tensor: torch.Tensor, op: str = "sum", *, consume: bool = False) -> Work:
        return self._comm.reduce_scatter(tensor, op, consume=consume)

    def all_to_all(self, tensor: torch.Tensor) -> Work:
        return self._comm.all_to_all(tensor)

    def all_to_all_rows(self, tensor: torch.Tensor, counts: torch.Tensor) -> Work:
        return self._comm.all_to_all_rows(tensor, counts)

    def broadcast(self, tensor: torch.Tensor, root: int) -> Work:
        return self._comm.broadcast(tensor, root)

    def send(self, tensor: torch.Tensor, to: int, tag: int = 0) -> Work:
        return self._comm.send(tensor, to, tag)

    def recv(self, like: torch.Tensor, source: int, tag: int = 0) -> Work:
        return self._comm.recv(like, source, tag)

    def barrier(self) -> None:
        self._comm.barrier()
