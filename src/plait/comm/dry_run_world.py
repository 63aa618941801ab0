"""A world without other ranks, for dry runs on tensors without memory.

Its collectives create the tensors that the transport would create, and send nothing. `meter` counts their bytes (see
compile/memory_meter.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import torch

from plait.comm.algorithms import choose
from plait.comm.group import AloneComm, Done, chunk, reduce_terms
from plait.comm.key_value_store import KeyValueStore, LocalStore
from plait.comm.process_group_transport import ProcessGroupComm, ProcessGroupWork, Start
from plait.comm.protocol import Comm, RankMonitor, Take, Work
from plait.comm.segment import Arena
from plait.compile.memory_meter import Meter
from plait.cost.memory_model import ACTIVATIONS
from plait.spec.mesh import Mesh


class DryRunWorld:
    """The World of one rank whose peers do not exist, as with shared memory or with torch.distributed."""

    def __init__(
        self, mesh: Mesh, rank: int, device: torch.device, algorithm: str, shared_memory: bool, meter: Meter
    ) -> None:
        self.mesh = mesh
        self.rank = rank
        self.device = device
        self.store: KeyValueStore = _EqualStore()
        self.monitor: RankMonitor | None = None
        self.meter = meter
        self._algorithm = algorithm
        self._shared_memory = shared_memory
        self._shared: dict[str, DryRunSharedMemoryComm] = {}
        self._comms = {axis: self._comm(axis, mesh.group(rank, axis)) for axis in mesh.communicators}
        self._everyone = self._comm("", tuple(range(mesh.size)))

    @property
    def arena_bytes(self) -> int:
        """Bytes of shared memory that this rank has needed for its messages."""
        return sum(comm.arena_bytes for comm in self._shared.values())

    def expect(self, axis: str, num_bytes: int) -> None:
        """Count messages along an axis, of which up to `num_bytes` are in shared memory at a time."""
        if axis in self._shared:
            self._shared[axis].arena_bytes = max(self._shared[axis].arena_bytes, num_bytes)

    def comm(self, axis: str, channel: str = "") -> Comm:
        return self._comms[axis]

    def everyone(self) -> Comm:
        return self._everyone

    def close(self) -> None:
        pass

    def _comm(self, axis: str, ranks: tuple[int, ...]) -> Comm:
        here = ranks.index(self.rank)
        if len(ranks) == 1:
            return AloneComm(self.rank)
        if not self._shared_memory:
            return choose(DryRunProcessGroupComm(ranks, here, self.meter), self._algorithm)
        self._shared[axis] = DryRunSharedMemoryComm(ranks, here, self.meter)
        return choose(self._shared[axis], self._algorithm)


class DryRunProcessGroupComm(ProcessGroupComm):
    """A ProcessGroupComm that sends nothing. Of memory that a group shares, each rank counts its part. As many rows
    arrive in `all_to_all_rows` as are sent."""

    def __init__(self, ranks: tuple[int, ...], rank: int, meter: Meter) -> None:
        super().__init__(ranks, rank, None, meter.device)
        self._meter = meter
        self._counted: list[torch.Tensor] = []

    def shared(self, num_bytes: int) -> torch.Tensor | None:
        self._counted.append(torch.empty(-(-num_bytes // self.size), dtype=torch.uint8))
        with self._meter.paused():
            return torch.empty(num_bytes, dtype=torch.uint8)

    def all_to_all_rows(self, tensor: torch.Tensor, counts: torch.Tensor) -> Work:
        return self.all_to_all(tensor)

    def recv(self, like: torch.Tensor, source: int, tag: int = 0) -> Work:
        with self._meter.labelled(ACTIVATIONS):
            return Done(torch.empty(like.shape, dtype=like.dtype, device=self._meter.device))

    def barrier(self) -> None:
        pass

    def _run(
        self,
        name: str,
        result: torch.Tensor,
        start: Start,
        finish: Callable[[], object] | None = None,
        **_: object,
    ) -> Work:
        return ProcessGroupWork(name, lambda: _Sent(start), result, finish)


class _Sent:
    """Takes the place of a Work of torch.distributed, and keeps its tensors alive."""

    def __init__(self, start: Start) -> None:
        self._start = start

    def wait(self) -> None:
        pass


class DryRunSharedMemoryComm(DryRunProcessGroupComm):
    """A SharedMemoryComm without peers, as if they were one collective behind.

    Results are new tensors. What is sent lies in an arena, of which at most `arena_bytes` were in use. The system never
    gets its pages back, so the meter does not count them one by one.
    """

    takes = True

    def __init__(self, ranks: tuple[int, ...], rank: int, meter: Meter) -> None:
        super().__init__(ranks, rank, meter)
        self._arena = Arena(0, 1 << 60)
        self.arena_bytes = 0
        self._buffers: dict[int, int] = {}  # storage -> its offset in the arena
        self._pending: deque[_Pending] = deque()
        self._letters: dict[int, tuple[int, int]] = {}  # the last message to each rank: its offset and bytes

    def buffer(self, num_elements: int, dtype: torch.dtype) -> torch.Tensor | None:
        if num_elements == 0:
            return None
        offset = self._take(num_elements * dtype.itemsize)
        with self._meter.paused():
            flat = torch.empty(num_elements, dtype=dtype)
        self._buffers[flat.untyped_storage()._cdata] = offset
        return flat

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum", *, consume: bool = False) -> Work:
        buffered = tensor.untyped_storage()._cdata in self._buffers

        def arrive() -> torch.Tensor:
            if self.size > 2:  # each rank sums one chunk, in its block
                start, end = chunk(tensor.numel(), self.size, self.rank)
                part = tensor.view(-1)[start:end]
                reduce_terms([part.clone() if buffered else part, *[part] * (self.size - 1)], op, part)
            return tensor if consume and not buffered else torch.empty_like(tensor)

        return self._start(tensor, arrive)

    def all_gather(self, tensor: torch.Tensor, *, take: Take | None = None) -> Work:
        def arrive() -> torch.Tensor:
            if take is None:
                return tensor.new_empty((self.size, *tensor.shape))
            for rank in range(self.size):
                take(rank, tensor.view(-1))
            return tensor

        return self._start(tensor, arrive)

    def reduce_scatter(self, tensor: torch.Tensor, op: str = "sum", *, consume: bool = False) -> Work:
        def arrive() -> torch.Tensor:
            row = tensor[self.rank]
            return reduce_terms([row] * self.size, op, torch.empty_like(row))

        return self._start(tensor, arrive)

    def all_to_all(self, tensor: torch.Tensor) -> Work:
        return self._start(tensor, lambda: torch.empty_like(tensor))

    def broadcast(self, tensor: torch.Tensor, root: int) -> Work:
        if self.rank == root:
            return self._start(tensor, lambda: torch.empty_like(tensor))
        return Done(torch.empty_like(tensor))

    def send(self, tensor: torch.Tensor, to: int, tag: int = 0) -> Work:
        """Keep the message in the arena until the next one to that rank."""
        if before := self._letters.pop(to, None):
            self._arena.give(*before)
        if tensor.nbytes:
            self._letters[to] = (self._take(tensor.nbytes), tensor.nbytes)
        return Done(tensor)

    def _start(self, tensor: torch.Tensor, arrive: Callable[[], torch.Tensor]) -> Work:
        while self._pending:
            self._pending[0].wait()
        offset = self._buffers.pop(tensor.untyped_storage()._cdata, None)
        if offset is None:
            offset = self._take(tensor.nbytes)
        num_bytes, label = tensor.nbytes, self._meter.label

        def finish() -> torch.Tensor:
            with self._meter.labelled(label):
                result = arrive()
            self._arena.give(offset, num_bytes)
            self._pending.popleft()
            return result

        self._pending.append(_Pending(finish))
        return self._pending[-1]

    def _take(self, num_bytes: int) -> int:
        offset = self._arena.take(num_bytes)
        assert offset is not None
        self.arena_bytes = max(self.arena_bytes, offset + num_bytes)
        return offset


class _Pending:
    """A collective that has started; earlier ones are complete."""

    def __init__(self, finish: Callable[[], torch.Tensor]) -> None:
        self._finish: Callable[[], torch.Tensor] | None = finish
        self._result: torch.Tensor | None = None

    def wait(self) -> torch.Tensor:
        if self._finish is not None:
            self._result, self._finish = self._finish(), None
        assert self._result is not None
        return self._result


class _EqualStore(LocalStore):
    """A store in which every rank has set the same text as this one."""

    def __init__(self) -> None:
        super().__init__()
        self._last = ""

    def set(self, key: str, text: str) -> None:
        self._last = text

    def get(self, key: str) -> str | None:
        return self._last

    def missing(self, keys: Sequence[str], seconds: float) -> list[str]:
        return []
