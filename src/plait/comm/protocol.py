"""The protocol that every transport speaks. One `Comm` is one group of ranks: those along one mesh axis.

Nothing here is global: a rank gets its World, a World gives a Comm for each axis, and both are passed explicitly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch

from plait.comm.key_value_store import KeyValueStore
from plait.comm.links import Links
from plait.spec.mesh import Mesh

Take = Callable[[int, torch.Tensor], None]


class Work(Protocol):
    """A collective under way. `wait` returns its result, and raises what stopped it."""

    def wait(self) -> torch.Tensor: ...


class Comm(Protocol):
    """Collectives among `size` ranks; every rank of the group calls the same ones in the same order.

    Inputs are contiguous and left as they were, unless `consume` says that the callee may overwrite them; the caller
    does not change them before `wait` has returned. What is reduced is summed in one order on all ranks, so that every
    rank gets the same bits; half precision is summed in float32 and rounded once (by NCCL, as NCCL does). Sums of bool
    are "or".
    """

    rank: int
    size: int
    links: Links  # bytes sent to each peer so far

    def buffer(self, num_elements: int, dtype: torch.dtype) -> torch.Tensor | None:
        """A flat tensor that a collective need not copy from: one all_reduce, all_gather, or reduce_scatter with
        `consume`, which ends its life.

        None where the transport has no such place. Each buffer taken must be so used, from its first element on.
        """

    def shared(self, num_bytes: int) -> torch.Tensor | None:
        """Host memory that all ranks of the group read and write: flat uint8 of zeros, aligned to 64 bytes.

        None, on every rank, where they have none in common, such as on several hosts. What a rank writes the others see
        after a barrier.
        """

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum", *, consume: bool = False) -> Work:
        """Sum (or `max`, `min`) of every rank's tensor, on every rank. Shape as given."""

    def all_gather(self, tensor: torch.Tensor, *, take: Take | None = None) -> Work:
        """Every rank's tensor, stacked in rank order: [size, *shape].

        With `take` nothing is stacked: it is called with (rank, its tensor, flat) for every rank of the group, before
        `wait` returns, and must not keep the tensor.
        """

    def reduce_scatter(self, tensor: torch.Tensor, op: str = "sum", *, consume: bool = False) -> Work:
        """Of the sum of [size, *shape] tensors, this rank's row: [*shape]."""

    def all_to_all(self, tensor: torch.Tensor) -> Work:
        """Row i of [size, *shape] goes to rank i; the result's row j came from rank j."""

    def broadcast(self, tensor: torch.Tensor, root: int) -> Work:
        """The root's tensor on every rank; the others give one of the same shape and dtype."""

    def send(self, tensor: torch.Tensor, to: int, tag: int = 0) -> Work: ...

    def recv(self, like: torch.Tensor, source: int, tag: int = 0) -> Work:
        """A tensor of the shape and dtype of `like`; `like` itself is not written to."""

    def barrier(self) -> None: ...


class Waiting(Protocol):
    """A wait for other ranks."""

    def check(self) -> None:
        """Raise WorldError if it will not end: a rank that it is for has ended or failed, or waits for this one."""


class RankMonitor(Protocol):
    """Looks after the ranks that this one waits for."""

    num_steps: int  # that this rank has begun

    def does(self, what: str) -> None:
        """Say what this rank does now, for those who will wait for it."""

    def waiting(self, what: str, late: Callable[[], Sequence[int]]) -> AbstractContextManager[Waiting]:
        """Within it this thread waits; `late()` names the ranks that have yet to do something for the wait to end."""

    def behind_step(self, step: int) -> list[int]:
        """The ranks that have not begun that many steps."""


class World(Protocol):
    """This rank's view of all ranks. `comm` of an axis of size 1 works too, and moves nothing."""

    mesh: Mesh
    rank: int
    device: torch.device
    board: KeyValueStore  # where ranks leave each other notes

    @property
    def monitor(self) -> RankMonitor | None:
        """Looks after other ranks; None where there are none."""

    def comm(self, axis: str) -> Comm: ...

    def everyone(self) -> Comm:
        """The group of all ranks of the mesh, for agreements outside the step."""

    def close(self) -> None: ...
