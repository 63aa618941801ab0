"""Records when a rank starts each collective and how long it waits for it, and measures how far clocks differ."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from plait.comm.protocol import Comm, Work, World
from plait.comm.sharing import host_name

# The kind of span of each collective (spec.trace.KINDS).
KIND_OF = {
    "all_reduce": "reduce", "reduce_scatter": "reduce", "all_gather": "gather", "all_to_all": "wait",
    "all_to_all_rows": "wait", "broadcast": "wait",
}  # fmt: skip
_NUM_ROUNDS = 15


class Spans(Protocol):
    """Records spans."""

    def span(self, kind: str, name: str, action: Any = None, num_bytes: int = 0) -> AbstractContextManager[object]: ...


class TracedComm:
    """A Comm that records its collectives, at their start and during the wait for them, and delegates the rest.

    Sends and receives are recorded by their callers, who know what they are for.
    """

    def __init__(self, comm: Comm, axis: str, spans: Spans) -> None:
        self.comm = comm
        self.axis = axis
        self._spans = spans
        self._names = {call: f"{call} {axis}" for call in KIND_OF}
        self.rank, self.size, self.links = comm.rank, comm.size, comm.links

    def __getattr__(self, name: str) -> Any:
        return getattr(self.comm, name)

    def all_reduce(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Work:
        return self._traced("all_reduce", tensor, args, kwargs)

    def reduce_scatter(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Work:
        return self._traced("reduce_scatter", tensor, args, kwargs)

    def all_gather(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Work:
        return self._traced("all_gather", tensor, args, kwargs)

    def all_to_all(self, tensor: torch.Tensor) -> Work:
        return self._traced("all_to_all", tensor, (), {})

    def all_to_all_rows(self, tensor: torch.Tensor, counts: torch.Tensor) -> Work:
        return self._traced("all_to_all_rows", tensor, (counts,), {})

    def broadcast(self, tensor: torch.Tensor, root: int) -> Work:
        return self._traced("broadcast", tensor, (root,), {})

    def _traced(self, call: str, tensor: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Work:
        kind, name = KIND_OF[call], self._names[call]
        with self._spans.span(kind, name, num_bytes=tensor.nbytes):
            work = getattr(self.comm, call)(tensor, *args, **kwargs)
        return _TracedWork(work, kind, name, self._spans)


class _TracedWork:
    def __init__(self, work: Work, kind: str, name: str, spans: Spans) -> None:
        self._work = work
        self._kind, self._name = kind, name
        self._spans = spans

    def wait(self) -> torch.Tensor:
        with self._spans.span(self._kind, self._name):
            return self._work.wait()


def trace_comms(world: World, spans: Spans) -> None:
    """Record the collectives of every axis with several ranks from now on. Changes `world`."""
    comms: dict[str, Comm] = world._comms  # type: ignore[attr-defined]  # all worlds have it
    for name, comm in comms.items():
        if comm.size > 1:
            comms[name] = TracedComm(comm, name.partition(",")[0], spans)


def untrace_comms(world: World) -> None:
    """Undo `trace_comms`. Changes `world`."""
    comms: dict[str, Comm] = world._comms  # type: ignore[attr-defined]
    for axis, comm in comms.items():
        if isinstance(comm, TracedComm):
            comms[axis] = comm.comm


def clock_offset(world: World, host: str | None = None, clock: Callable[[], int] = time.perf_counter_ns) -> int:
    """Nanoseconds by which this rank's clock is ahead of rank 0's; 0 on rank 0's host, where both read one clock.

    Every rank calls it. All ranks read their clocks right after a barrier, several times. The error of the median
    difference is the few microseconds between ranks leaving a barrier.
    """
    everyone = world.everyone()
    if everyone.size == 1:
        return 0
    hosts = _hosts(everyone, host_name() if host is None else host, world.device)
    if len(set(hosts)) == 1:
        return 0
    found = []
    for _ in range(_NUM_ROUNDS):
        everyone.barrier()
        now = torch.tensor([clock()], device=world.device)
        times = everyone.all_gather(now).wait().flatten().tolist()
        first = hosts.index(hosts[everyone.rank])  # ranks of one host have one clock, and so one offset
        found.append(times[first] - times[0])
    return sorted(found)[_NUM_ROUNDS // 2] if hosts[everyone.rank] != hosts[0] else 0


def _hosts(everyone: Comm, name: str, device: torch.device) -> list[int]:
    """A number for the host of every rank. Without a name each rank counts as a host of its own."""
    number = _hash_of(name) if name else -1 - everyone.rank
    return [int(n) for n in everyone.all_gather(torch.tensor([number], device=device)).wait().flatten().tolist()]


def _hash_of(name: str) -> int:
    """A hash of 60 bits that is the same in every process."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest()) >> 4
