"""The transport through torch.distributed: NCCL between GPUs, Gloo between CPUs of several hosts."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

from plait.comm.device import is_host
from plait.comm.group import HALF, Done, GroupComm, reduce_terms, row_bytes
from plait.comm.monitor import LateRanks, Monitor
from plait.comm.protocol import Take, Work
from plait.comm.sharing import share_file
from plait.comm.thread_transport import taking
from plait.errors import WorldError

# torch 2.13 renamed these, and warns of the old names.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_to_all = dist.all_to_all_single
_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
_T = TypeVar("_T")


class InFlight(Protocol):
    """What torch.distributed returns for a collective that has begun."""

    def wait(self) -> object: ...


Start = Callable[[], InFlight | None]


class ProcessGroupWork:
    """A collective of torch.distributed in flight, the tensor that it fills, and what to call once it is complete."""

    def __init__(
        self,
        what: str,
        start: Start,
        result: torch.Tensor,
        finish: Callable[[], object] | None = None,
        monitor: Monitor | None = None,
        late: LateRanks = tuple,
    ) -> None:
        self._what = what
        self._monitor, self._late = monitor, late
        self._result = result
        self._finish = finish
        self._work = self._guarded(start)

    def wait(self) -> torch.Tensor:
        if self._work is not None:
            wait = self._monitor.begin(self._what, self._late) if self._monitor is not None else None
            try:
                self._guarded(self._work.wait)
            finally:
                if wait is not None and self._monitor is not None:
                    self._monitor.end(wait)
            self._work = None
            if self._finish is not None:
                self._finish()
                self._finish = None
        return self._result

    def _guarded(self, call: Callable[[], _T]) -> _T:
        try:
            return call()
        except RuntimeError as error:
            if self._monitor is not None:
                gone = self._monitor.find_gone()
                if gone is not None:
                    raise self._monitor.why_gone(gone, self._what) from error
            text = (str(error).splitlines() or ["no reason given"])[0]
            raise WorldError(f"{self._what} failed, which mostly means that another rank is gone: {text}") from error


class ProcessGroupComm(GroupComm):
    """A process group of torch.distributed for collectives, and two for messages. Empty tensors are not sent.

    Over NCCL a message waits, with all that its group does later, until both ranks have called it. So messages have
    groups of their own, `message_groups`: one for those to lower ranks, and one for those to higher ranks. In a group
    that is not bound to a device, each pair of ranks has a communicator to itself.
    """

    def __init__(
        self,
        ranks: tuple[int, ...],
        rank: int,
        group: dist.ProcessGroup | None,
        device: torch.device,
        monitor: Monitor | None = None,
    ) -> None:
        super().__init__(ranks, rank)
        self._monitor = monitor
        self._num_received: Counter[str] = Counter()  # receives posted, by pair of ranks
        self._group = group
        self._device = device
        self.message_groups = (group, group)

    def channel(self, group: dist.ProcessGroup | None) -> ProcessGroupComm:
        """The collectives of these ranks through another process group. Counts bytes with this one's."""
        found = ProcessGroupComm(self.ranks, self.rank, group, self._device, self._monitor)
        found.links = self.links
        return found

    def shared(self, num_bytes: int) -> torch.Tensor | None:
        return share_file(self, num_bytes, self._device)

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum", *, consume: bool = False) -> Work:
        if self._rounds(tensor, op):
            return self._all_reduce_wide(tensor.detach(), op, consume)
        result = tensor.detach() if consume else tensor.detach().clone()
        self.count_ring_all_reduce(tensor)
        data, op = _reducible(result, op)
        return self._run("all_reduce", result, lambda: dist.all_reduce(data, _OPS[op], self._group, async_op=True))

    def _all_reduce_wide(self, tensor: torch.Tensor, op: str, consume: bool) -> Work:
        """All-reduce in float32 with twice the bytes, because Gloo rounds half precision after every addition."""
        result = tensor if consume else torch.empty_like(tensor)
        wide = tensor.float()
        self.count_ring_all_reduce(wide)

        def start() -> Any:
            return dist.all_reduce(wide, _OPS[op], self._group, async_op=True)

        return self._run("all_reduce", result, start, lambda: result.copy_(wide))

    def all_gather(self, tensor: torch.Tensor, *, take: Take | None = None) -> Work:
        if take is not None:
            return taking(self.all_gather(tensor), take)
        result = tensor.new_empty((self.size, *tensor.shape))
        flat, into = _bytes(tensor), _bytes(result)
        self.count_ring(tensor.nbytes * (self.size - 1))
        return self._run("all_gather", result, lambda: _all_gather(into, flat, self._group, async_op=True))

    def reduce_scatter(self, tensor: torch.Tensor, op: str = "sum", *, consume: bool = False) -> Work:
        result = tensor.new_empty(tensor.shape[1:])
        self.count_ring(result.nbytes * (self.size - 1))
        if self._rounds(tensor, op):
            rows = torch.empty_like(tensor)
            into, flat = _bytes(rows), _bytes(tensor)

            def swap() -> Any:
                return _all_to_all(into, flat, group=self._group, async_op=True)

            return self._run("reduce_scatter", result, swap, lambda: reduce_terms(list(rows), op, result))
        data, op = _reducible(tensor.detach().view(-1), op)
        out = result.view(-1).view(data.dtype)

        def start() -> Any:
            return _reduce_scatter(out, data, _OPS[op], self._group, async_op=True)

        return self._run("reduce_scatter", result, start)

    def all_to_all(self, tensor: torch.Tensor) -> Work:
        result = torch.empty_like(tensor)
        for i, rank in enumerate(self.ranks):
            if i != self.rank:
                self.links.count(rank, tensor.nbytes // self.size)
        out, flat = _bytes(result), _bytes(tensor)
        return self._run("all_to_all", result, lambda: _all_to_all(out, flat, group=self._group, async_op=True))

    def all_to_all_rows(self, tensor: torch.Tensor, counts: torch.Tensor) -> Work:
        sent, received = counts.tolist()
        self.count_rows(tensor, sent)
        result, width = tensor.new_empty((sum(received), *tensor.shape[1:])), row_bytes(tensor)
        out, flat = _bytes(result), _bytes(tensor[: sum(sent)])
        arriving, leaving = ([num * width for num in nums] for nums in (received, sent))

        def start() -> Any:
            return _all_to_all(out, flat, arriving, leaving, group=self._group, async_op=True)

        what = f"all_to_all_rows of {list(tensor.shape[1:])} among ranks {list(self.ranks)}"
        return self._started(what, start, result) if width else Done(result)  # others may have rows

    def broadcast(self, tensor: torch.Tensor, root: int) -> Work:
        result = tensor.detach().clone()
        self.count_broadcast(tensor, root)
        source, data = self.ranks[root], _bytes(result)
        return self._run("broadcast", result, lambda: dist.broadcast(data, source, self._group, async_op=True))

    def send(self, tensor: torch.Tensor, to: int, tag: int = 0) -> Work:
        self.links.count(self.ranks[to], tensor.nbytes)
        data = tensor.detach()
        pair = f"{self.ranks[self.rank]}>{self.ranks[to]}"
        group = self.message_groups[to > self.rank]
        return self._run("send", data, lambda: dist.isend(data, self.ranks[to], group, tag), pair=pair)

    def recv(self, like: torch.Tensor, source: int, tag: int = 0) -> Work:
        result = torch.empty_like(like)
        pair = f"{self.ranks[source]}>{self.ranks[self.rank]}"
        self._num_received[pair] += 1
        number = self._num_received[pair]

        def late() -> list[int]:
            return [] if self._monitor is None else self._monitor.behind(pair, number, [self.ranks[source]])

        group = self.message_groups[source < self.rank]
        return self._run("recv", result, lambda: dist.irecv(result, self.ranks[source], group, tag), late=late)

    def barrier(self) -> None:
        flag = torch.zeros(1)  # on the host, which is to wait: an accelerator's collective would block its stream alone
        self._started("barrier", lambda: dist.all_reduce(flag, group=self._group, async_op=True), flag).wait()

    def _rounds(self, tensor: torch.Tensor, op: str) -> bool:
        """Whether Gloo would round the sum more than once. NCCL sums half precision in its own way, at its own
        speed."""
        return tensor.dtype in HALF and op == "sum" and self.size > 2 and is_host(tensor.device)

    def _run(
        self,
        name: str,
        result: torch.Tensor,
        start: Start,
        finish: Callable[[], object] | None = None,
        *,
        pair: str = "",
        late: LateRanks | None = None,
    ) -> Work:
        if result.numel() == 0:
            return Done(result)
        what = f"{name} of {list(result.shape)} among ranks {list(self.ranks)}"
        return self._started(what, start, result, finish, pair, late)

    def _started(
        self,
        what: str,
        start: Start,
        result: torch.Tensor,
        finish: Callable[[], object] | None = None,
        pair: str = "",
        late: LateRanks | None = None,
    ) -> ProcessGroupWork:
        """Start a collective or message, and count it for the monitors of other ranks; `pair` is given for a send."""
        monitor = self._monitor
        if monitor is not None and late is None:
            group = pair or f"{self.ranks}"
            monitor.started[group] += 1
            number = monitor.started[group]
            late = tuple if pair else functools.partial(monitor.behind, group, number, self.ranks)
        return ProcessGroupWork(what, start, result, finish, monitor, late or tuple)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as flat bytes: a backend may not know the dtype of a tensor that it only moves."""
    return tensor.detach().view(-1).view(torch.uint8)


def _reducible(tensor: torch.Tensor, op: str) -> tuple[torch.Tensor, str]:
    """bool as bytes, which backends know; their "or" is the maximum."""
    if tensor.dtype != torch.bool:
        return tensor, op
    return tensor.view(torch.uint8), "max" if op == "sum" else op
