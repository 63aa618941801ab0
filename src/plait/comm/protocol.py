"""The protocol that every transport implements. One `Comm` is one group of ranks: those along one mesh axis.

Nothing here is global: a rank has a World, a World has a Comm for each axis, and both are passed explicitly.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch

from plait.comm.key_value_store import KeyValueStore
from plait.spec.mesh import Mesh

Take = Callable[[int, torch.Tensor], None]


class Links:
    """Bytes that this rank has sent over each link: `sent` counts them by the global rank of the receiver."""

    def __init__(self) -> None:
        self.sent: Counter[int] = Counter()

    def count(self, to: int, num_bytes: int) -> None:
        """Add `num_bytes` sent to global rank `to`."""
        self.sent[to] += num_bytes

    def total(self) -> int:
        """Bytes sent to all ranks."""
        return sum(self.sent.values())

    def reset(self) -> None:
        """Set all counts to 0."""
        self.sent.clear()


class Work(Protocol):
    """A collective in flight. `wait` returns its result, or raises what stopped it."""

    def wait(self) -> torch.Tensor: ...


class Comm(Protocol):
    """Collectives among `size` ranks. Every rank of the group calls the same collectives in the same order.

    Inputs are contiguous. They are left unchanged, unless `consume` lets the transport overwrite them, and the caller
    does not change them before `wait` returns. Reductions add in one order on all ranks, so that all get the same bits.
    Half precision is summed in float32 and rounded once (NCCL sums in its own way). A sum of bool is "or".
    """

    rank: int
    size: int
    links: Links
    takes: bool  # whether an all_gather with `take` stacks nothing, because ranks read each other's memory

    def buffer(self, num_elements: int, dtype: torch.dtype) -> torch.Tensor | None:
        """A flat tensor from which a collective need not copy; None if the transport has no such memory.

        Each buffer must be passed, from its first element on, to one all_reduce or all_gather, or to one reduce_scatter
        with `consume`, after which it is invalid.
        """

    def shared(self, num_bytes: int) -> torch.Tensor | None:
        """Host memory that all ranks of the group read and write: flat uint8 of zeros, aligned to 64 bytes.

        None, on every rank, if the ranks cannot share memory, for example on several hosts. Other ranks see what a rank
        writes after a barrier.
        """

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum", *, consume: bool = False) -> Work:
        """The sum (or `max`, `min`) of every rank's tensor, on every rank, in the same shape."""

    def all_gather(self, tensor: torch.Tensor, *, take: Take | None = None) -> Work:
        """Every rank's tensor, stacked in rank order: [size, *shape].

        With `take` the result is not used: `take(rank, tensor)` is called with the flat tensor of each rank, before
        `wait` returns, and must not keep the tensor. A transport without `takes` stacks the tensors nevertheless.
        """

    def reduce_scatter(self, tensor: torch.Tensor, op: str = "sum", *, consume: bool = False) -> Work:
        """This rank's row, [*shape], of the sum of all ranks' tensors, [size, *shape]."""

    def all_to_all(self, tensor: torch.Tensor) -> Work:
        """Row i of a [size, *shape] tensor goes to rank i; row j of the result came from rank j."""

    def all_to_all_rows(self, tensor: torch.Tensor, counts: torch.Tensor) -> Work:
        """As many rows of dim 0 to each rank as there are for it. `counts` is int64 [2, size] in host memory: the first
        counts[0, 0] rows go to rank 0, the next counts[0, 1] to rank 1; the result has counts[1, j] rows from rank j,
        in the order of ranks. Rows after those that are counted are not sent."""

    def broadcast(self, tensor: torch.Tensor, root: int) -> Work:
        """The root's tensor, on every rank. Other ranks pass one of the same shape and dtype."""

    def send(self, tensor: torch.Tensor, to: int, tag: int = 0) -> Work:
        """Send a tensor to rank `to` of the group. Messages to one rank are received in the order in which they are
        sent: NCCL has no tags, other transports use them to tell messages apart."""

    def recv(self, like: torch.Tensor, source: int, tag: int = 0) -> Work:
        """Receive a tensor of the shape and dtype of `like`, which is not written to, from rank `source` of the
        group."""

    def barrier(self) -> None: ...


class Waiting(Protocol):
    """A wait for other ranks."""

    def check(self) -> None:
        """Raise WorldError if the wait cannot end: a rank that it is for has ended, failed, or waits for this one."""


class RankMonitor(Protocol):
    """Watches over the ranks that this one waits for. `num_steps` counts the steps that this rank has begun."""

    num_steps: int

    def does(self, what: str) -> None:
        """Say what this rank does now, for messages about waits for it."""

    def waiting(self, what: str, late: Callable[[], Sequence[int]]) -> AbstractContextManager[Waiting]:
        """Within the context this thread waits; `late()` names the ranks that have yet to act before it can end."""

    def behind_step(self, step: int) -> list[int]:
        """The ranks that have begun fewer than `step` steps."""


REDUCTIONS = "reductions"  # the channel of reduce-scatters of gradients, beside which parameters are gathered
CHANNELS = (REDUCTIONS,)


def channel_key(axis: str, channel: str) -> str:
    """The name of a channel of an axis among the groups of a world."""
    return f"{axis}, {channel}"


def find_comm(comms: Mapping[str, Comm], mesh: Mesh, axis: str, channel: str) -> Comm:
    """What `World.comm` returns, from the groups of a rank by axis and channel. Raises for an axis not in the mesh."""
    mesh.axis_size(axis)
    return comms.get(channel_key(axis, channel), comms[axis]) if channel else comms[axis]


class World(Protocol):
    """This rank's view of all ranks. `comm` works for an axis of size 1 too, and then sends nothing.

    Where a group runs its collectives one after the other, those of a `channel`, one of CHANNELS, run beside the others
    through a communicator of their own. Where it does not, as in shared memory, a channel is the same Comm.

    `store` holds short texts that ranks leave for each other, outside collectives.
    """

    mesh: Mesh
    rank: int
    device: torch.device
    store: KeyValueStore

    @property
    def monitor(self) -> RankMonitor | None:
        """Watches over other ranks; None if there are none."""

    def comm(self, axis: str, channel: str = "") -> Comm: ...

    def everyone(self) -> Comm:
        """The group of all ranks of the mesh, for communication outside the step."""

    def close(self) -> None: ...
