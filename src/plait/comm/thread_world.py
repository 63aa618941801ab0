"""Ranks as threads of this process, to verify, debug and test plans on one machine.

Tensors are exchanged by reference. The last rank to join a collective computes its result for all, in rank order, while
every other rank still holds its input unchanged; each rank then takes its own copy.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable
from typing import TypeVar

import torch

from plait.comm.algorithms import choose
from plait.comm.device import make_current, use_fake_tensors_first
from plait.comm.group import AloneComm
from plait.comm.key_value_store import KeyValueStore
from plait.comm.protocol import Comm, RankMonitor, channel_key, find_comm
from plait.comm.strict_transport import Queues
from plait.comm.thread_transport import Meetings, ThreadWatch
from plait.errors import RankFailed
from plait.spec.mesh import Mesh

T = TypeVar("T")


class ThreadWorld:
    """The World of a rank that is a thread of this process."""

    def __init__(self, mesh: Mesh, rank: int, device: torch.device, meetings: Meetings, algorithm: str) -> None:
        self.mesh = mesh
        self.rank = rank
        self.device = device
        self.store: KeyValueStore = meetings.store
        self.monitor: RankMonitor | None = ThreadWatch(meetings, rank) if mesh.size > 1 else None
        self._comms: dict[str, Comm] = {}
        for axis in mesh.communicators:
            ranks = mesh.group(rank, axis)
            comm = self._comms[axis] = _comm(ranks, rank, axis, meetings, algorithm)
            for channel in meetings.channels if comm.size > 1 else ():
                name = channel_key(axis, channel)
                own = self._comms[name] = meetings.comm(ranks, ranks.index(rank), name)
                own.links = comm.links
        self._everyone = _comm(tuple(range(mesh.size)), rank, "", meetings, algorithm)

    def comm(self, axis: str, channel: str = "") -> Comm:
        return find_comm(self._comms, self.mesh, axis, channel)

    def everyone(self) -> Comm:
        return self._everyone

    def close(self) -> None:
        pass


def _comm(ranks: tuple[int, ...], rank: int, axis: str, meetings: Meetings, algorithm: str) -> Comm:
    if len(ranks) == 1:
        return AloneComm(rank)
    return choose(meetings.comm(ranks, ranks.index(rank), axis), algorithm)


def alone(mesh: Mesh, device: torch.device | None = None) -> ThreadWorld:
    """The world of the only rank of a mesh, in the present thread; by default on the CPU."""
    return ThreadWorld(mesh, 0, device or torch.device("cpu"), Meetings(1), "backend")


def run_ranks(
    mesh: Mesh,
    fn: Callable[[ThreadWorld], T],
    *,
    device: str | torch.device = "cpu",
    algorithm: str = "backend",
    strict: bool = False,
) -> list[T]:
    """Run `fn(world)` on every rank of the mesh, each in a thread of its own. Returns the results in rank order.

    With `strict` the ranks communicate as over NCCL (comm/strict_transport.py): what would deadlock on GPUs raises.
    The first rank that raises stops all others in their present or next collective. Threads start with the caller's
    grad mode and context variables. While ranks run, torch's compute threads are divided among them. `algorithm` is an
    all-reduce algorithm of comm/algorithms.py.

    Raises RankFailed, from the exception of the first rank that raised.
    """
    use_fake_tensors_first()
    meetings = Queues(mesh.size) if strict else Meetings(mesh.size)
    where = torch.device(device)
    worlds = [ThreadWorld(mesh, rank, where, meetings, algorithm) for rank in range(mesh.size)]
    results: list[T | None] = [None] * mesh.size
    grad = torch.is_grad_enabled()

    def run(rank: int) -> None:
        try:
            with torch.set_grad_enabled(grad):
                make_current(where)
                results[rank] = fn(worlds[rank])
        except BaseException as error:  # SystemExit too: the others must not wait for this rank
            meetings.fail(rank, error)
        meetings.leave(rank)

    threads = [
        threading.Thread(target=contextvars.copy_context().run, args=(run, rank), name=f"rank {rank}", daemon=True)
        for rank in range(mesh.size)
    ]
    num_threads = torch.get_num_threads()
    torch.set_num_threads(max(1, num_threads // mesh.size))
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    except BaseException as error:  # Ctrl-C while waiting
        meetings.fail(0, error)
        for thread in threads:
            if thread.ident is not None:
                thread.join(5)
        raise
    finally:
        torch.set_num_threads(num_threads)
    if meetings.failure is not None:
        raise RankFailed(meetings.failure.rank, meetings.message) from meetings.cause
    return results  # type: ignore[return-value]
