"""What all transports share: a group's ranks, the cut of tensors into chunks, and counts of bytes sent."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from plait.comm.protocol import Links, Take

HALF = (torch.bfloat16, torch.float16)
REDUCERS: dict[str, Callable[..., torch.Tensor]] = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}


def reduce_terms(terms: Sequence[torch.Tensor], op: str, out: torch.Tensor | None = None) -> torch.Tensor:
    """The sum (max, min) of the terms, in their order; half precision in float32, rounded once. `out` is no term."""
    first, second, *others = terms
    reduce = REDUCERS[op]
    if not others or first.dtype not in HALF:
        out = reduce(first, second, out=out)
        for term in others:
            reduce(out, term, out=out)
        return out
    wide = reduce(first.float(), second)
    for term in others:
        reduce(wide, term, out=wide)
    return wide.to(first.dtype) if out is None else out.copy_(wide)


def row_bytes(tensor: torch.Tensor) -> int:
    """Bytes of a row of dim 0."""
    return math.prod(tensor.shape[1:]) * tensor.element_size()


def chunk(num: int, size: int, index: int) -> tuple[int, int]:
    """Bounds of part `index` of `num` elements cut into `size` parts whose lengths differ by at most one."""
    return num * index // size, num * (index + 1) // size


class Done:
    """Work that was complete when it was started."""

    def __init__(self, result: torch.Tensor) -> None:
        self._result = result

    def wait(self) -> torch.Tensor:
        return self._result


class GroupComm:
    """Base class of the transports: `ranks` are the global ranks of the group, `rank` this rank's index among them."""

    takes = False

    def __init__(self, ranks: tuple[int, ...], rank: int) -> None:
        self.ranks = ranks
        self.rank = rank
        self.size = len(ranks)
        self.links = Links()

    def buffer(self, num_elements: int, dtype: torch.dtype) -> torch.Tensor | None:
        return None

    def shared(self, num_bytes: int) -> torch.Tensor | None:
        return None

    def count_ring(self, num_bytes: int) -> None:
        """Count bytes that a library moves in its own way, as if they went along the ring."""
        self.links.count(self.ranks[(self.rank + 1) % self.size], num_bytes)

    def count_ring_all_reduce(self, tensor: torch.Tensor) -> None:
        """2(N-1)/N of the tensor: a rank passes on all chunks but one in each of two rounds."""
        n, rank, size = tensor.numel(), self.rank, self.size
        kept = [chunk(n, size, i % size) for i in (rank + 1, rank + 2)]
        self.count_ring((2 * n - sum(end - start for start, end in kept)) * tensor.element_size())

    def count_rows(self, tensor: torch.Tensor, sent: Sequence[int]) -> None:
        """As many rows of the tensor to each other rank."""
        for i, num in enumerate(sent):
            if i != self.rank:
                self.links.count(self.ranks[i], num * row_bytes(tensor))

    def count_broadcast(self, tensor: torch.Tensor, root: int) -> None:
        """Every rank passes the tensor to its neighbour, except the last one before the root."""
        if (self.rank + 1) % self.size != root:
            self.count_ring(tensor.nbytes)


class AloneComm(GroupComm):
    """A group of one rank, which sends nothing."""

    takes = True

    def __init__(self, rank: int) -> None:
        super().__init__((rank,), 0)

    def shared(self, num_bytes: int) -> torch.Tensor | None:
        return torch.zeros(num_bytes, dtype=torch.uint8)

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum", *, consume: bool = False) -> Done:
        return Done(tensor if consume else tensor.detach().clone())

    def all_gather(self, tensor: torch.Tensor, *, take: Take | None = None) -> Done:
        if take is not None:
            take(0, tensor.detach().view(-1))
            return Done(tensor)
        return Done(tensor.detach().clone().unsqueeze(0))

    def reduce_scatter(self, tensor: torch.Tensor, op: str = "sum", *, consume: bool = False) -> Done:
        return Done(tensor.detach()[0].clone())

    def all_to_all(self, tensor: torch.Tensor) -> Done:
        return Done(tensor.detach().clone())

    def all_to_all_rows(self, tensor: torch.Tensor, counts: torch.Tensor) -> Done:
        return Done(tensor.detach()[: int(counts[0, 0])].clone())

    def broadcast(self, tensor: torch.Tensor, root: int) -> Done:
        return Done(tensor.detach().clone())

    def send(self, tensor: torch.Tensor, to: int, tag: int = 0) -> Done:
        raise AssertionError("a group of one rank has nobody to send to")

    def recv(self, like: torch.Tensor, source: int, tag: int = 0) -> Done:
        raise AssertionError("a group of one rank has nobody to receive from")

    def barrier(self) -> None:
        pass
