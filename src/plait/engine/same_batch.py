"""Whether ranks that must hold the same batch do, at every step: a checksum of it travels beside the step.

A plain batch is the global one, the same on every rank. Of a LocalBatch, all ranks must be at the same place in the
data, and those with the same part of the batch (the ranks of tensor and pipeline) must hold the same rows.

Small tensors are read whole; of large ones a window that moves on with every step, and blocks all over the rest. A
tensor that is on a GPU is read there, and what came of it is looked at one step later, so that nothing waits for it.
"""

from __future__ import annotations

import functools
import zlib
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from plait.comm.agree import agree
from plait.comm.device import Event, is_host, pinned_like
from plait.comm.monitor import ranks_text
from plait.comm.protocol import Comm, Work, World
from plait.compile.capture.batch import batch_leaves, batch_numbers, batch_signature
from plait.engine.local_batch import LocalBatch
from plait.errors import WorldError
from plait.plan.plan import Plan

_WHOLE = 1 << 20  # bytes of a tensor that are all read, with a checksum that sees every change
_WINDOW = 16 << 20  # of a larger one, that are added up
_BLOCK, _NUM_BLOCKS = 4096, 64
_PRIME = 0x9E3779B97F4A7C15
_MASK = (1 << 63) - 1

_DATA = "place in the data"
_GLOBAL = (
    "a plain batch is the global one, the same on every rank: seed its loader alike, or use plait.loader, which gives"
    " each rank its rows"
)
_PLACE = "give plait.loader the same arguments on every rank, and take the same number of batches from it"
_ROWS = (
    "ranks with the same part of the batch must read the same rows: let the dataset give the same item for the same"
    " index on every rank, with random changes seeded by the index"
)


@dataclass
class _Sent:
    """What this rank said of its batch, and what the ranks of each group say."""

    step: str
    batch: str  # in words
    is_local: bool
    gathered: list[tuple[Comm, Tensor | Work]]
    ready: Any = None  # a CUDA event


class SameBatch:
    """One rank's comparison of its batches with those of the others."""

    def __init__(self, world: World, plan: Plan) -> None:
        self._world, self._plan = world, plan
        # Replicas that agree later may be apart by steps: they compare now and then, the ranks of each at every step.
        self._relaxed = plan.relaxed_axis
        if world.mesh.size == 1:
            self._groups: list[Comm] = []
        elif self._relaxed:
            axes = [axis for axis in world.mesh.names if axis != self._relaxed and world.mesh.axis_size(axis) > 1]
            self._groups = [world.comm(axis) for axis in axes]
        else:
            self._groups = [world.everyone()]
        self._behind = not is_host(world.device)  # what is computed here is known later
        self._sent: _Sent | None = None
        self._num_batches = self._chained = 0
        self._step = ""  # what this rank is in

    def awaited(self) -> AbstractContextManager[Any]:
        """Within it this rank waits for what a GPU works out, which needs the other ranks to have begun the step."""
        monitor = self._world.monitor
        if monitor is None or is_host(self._world.device) or self._relaxed:
            return nullcontext()
        return monitor.waiting(self._step, functools.partial(monitor.behind_step, monitor.num_steps))

    def begin(self, batch: Any, step: str) -> None:
        """Let the other ranks know of the step, or the evaluation, that this rank begins, and send what is to be
        compared of its batch. WorldError where that of the step before differed."""
        self._step = step
        if self._world.monitor is not None:
            self._world.monitor.num_steps += 1
            self._world.monitor.does(step)
        self.check(late=True)
        if self._world.mesh.size == 1:
            return
        local = isinstance(batch, LocalBatch)
        what = _place(batch) if local else batch_signature(batch)
        place = zlib.crc32(what.encode())
        content = _checksum(batch.tree if local else batch, self._num_batches)
        if self._relaxed:
            self._meet_now_and_then(batch, place if local else content, local)
        self._num_batches += 1
        if not self._groups:
            return
        head = torch.tensor([int(local), place, self._part()])
        if torch.is_tensor(content):
            note = torch.cat([head.to(content.device), content.reshape(1)]).to(self._world.device, non_blocking=True)
        else:
            note = torch.cat([head, torch.tensor([content])]).to(self._world.device, non_blocking=True)
        works = [(group, group.all_gather(note)) for group in self._groups]
        self._sent = _Sent(step, what, local, list(works))
        if self._behind:
            found = [(group, work.wait()) for group, work in works]
            host = [pinned_like(t, t.device).copy_(t, non_blocking=True) for _, t in found]
            self._sent.gathered = [(group, t) for (group, _), t in zip(found, host, strict=True)]
            self._sent.ready = Event(self._world.device)

    def check(self, late: bool = False) -> None:
        """Raise WorldError, on all ranks of a group, if its ranks differ. On a GPU only when it is late."""
        sent = self._sent
        if sent is None or (self._behind and not late):
            return
        self._sent = None
        if sent.ready is not None:
            sent.ready.synchronize()
        for group, work in sent.gathered:
            rows = (work if torch.is_tensor(work) else work.wait()).tolist()
            self._compare(sent, group, rows, late)

    def _compare(self, sent: _Sent, group: Comm, rows: list[list[int]], late: bool) -> None:
        if all(row == rows[0] for row in rows):
            return
        ranks = list(getattr(group, "ranks", range(len(rows))))
        what, remedy, seen = self._difference(rows)
        if not what:
            return
        remedy += f" ({sent.step}, {'after whose update this was found' if late else 'which was not applied'})"
        if not self._relaxed:
            own = sent.batch if what == _DATA else f"{sent.batch}, {seen[self._world.rank]}"
            agree(self._world, own, what, remedy=remedy)
        ranks_of: dict[str, list[int]] = {}
        for rank, text in zip(ranks, seen, strict=True):
            ranks_of.setdefault(text, []).append(rank)
        found = "; ".join(f"{ranks_text(each)}: {text}" for text, each in ranks_of.items())
        raise WorldError(f"the ranks do not agree on the {what}: {found}; {remedy}")

    def _difference(self, rows: list[list[int]]) -> tuple[str, str, list[str]]:
        """What is not alike, what to do about it, and what each rank has; nothing if all is well."""
        if len({local for local, *_ in rows}) > 1:
            kinds = ["a LocalBatch" if local else "a plain batch" for local, *_ in rows]
            return "kind of batch", "give every rank batches of the same loader", kinds
        local = bool(rows[0][0])
        if len({place for _, place, *_ in rows}) > 1:
            if local:
                return _DATA, _PLACE, [f"checksum {place:08x}" for _, place, *_ in rows]
            return "shape of the global batch", _GLOBAL, [f"checksum {place:08x}" for _, place, *_ in rows]
        if not local:
            if len({content for *_, content in rows}) == 1:
                return "", "", []
            return "numbers of the global batch", _GLOBAL, [f"checksum {content:016x}" for *_, content in rows]
        by_part: dict[int, set[int]] = {}
        for _, _, part, content in rows:
            by_part.setdefault(part, set()).add(content)
        if all(len(contents) == 1 for contents in by_part.values()):
            return "", "", []
        texts = [f"part {part} with checksum {content:016x}" for _, _, part, content in rows]
        return "rows of a part of the batch", _ROWS, texts

    def _part(self) -> int:
        return int(self._plan.batch_part(self._plan.mesh.coordinates(self._world.rank)))

    def _meet_now_and_then(self, batch: Any, said: int | Tensor, local: bool) -> None:
        """Of replicas that agree later: what all batches so far were, at steps 0, 1, 2, 4, 8..."""
        value = int(said) if torch.is_tensor(said) and is_host(said.device) else said
        if not torch.is_tensor(value):
            self._chained = zlib.crc32(value.to_bytes(8, "little"), self._chained)
        if self._num_batches & (self._num_batches - 1) == 0:
            if local:
                agree(self._world, _place(batch), _DATA, remedy=_PLACE)
            else:
                text = f"{batch_signature(batch)}, checksum {self._chained:08x}"
                agree(self._world, text, "numbers of the global batch", remedy=_GLOBAL)


def _place(batch: LocalBatch) -> str:
    """The place in the data, and the numbers that every rank has beside its rows."""
    numbers = batch_numbers(batch.tree)
    return f"{batch.place} with {numbers}" if numbers else batch.place


def _checksum(batch: Any, turn: int) -> int | Tensor:
    """63 bits that change with any change of a small tensor, and with almost any of a large one."""
    found, on_device = 0, None
    for leaf in batch_leaves(batch).values():
        if is_host(leaf.device):
            found = (found * _PRIME + _of_host(leaf.detach(), turn)) & _MASK
        else:
            one = _of_device(leaf.detach(), turn)
            on_device = one if on_device is None else on_device * 31 + one
    return found if on_device is None else (on_device + found) & _MASK


def _of_host(leaf: Tensor, turn: int) -> int:
    data = _bytes(leaf, turn).numpy()
    if data.nbytes <= _WHOLE:
        return zlib.crc32(data.data)
    start = _WINDOW * turn % data.nbytes // 8 * 8
    window = data[start : start + _WINDOW]
    total = int(window[: window.nbytes // 8 * 8].view(np.uint64).sum(dtype=np.uint64))
    total ^= zlib.crc32(window[-8:].data)
    for at in np.random.default_rng(turn).integers(0, data.nbytes - _BLOCK, _NUM_BLOCKS):
        total = (total * 31 + zlib.crc32(data[at : at + _BLOCK].data)) & _MASK
    return total & _MASK


def _of_device(leaf: Tensor, turn: int) -> Tensor:
    """The same in kind, without a look from the host."""
    data = _bytes(leaf, turn)
    start = _WINDOW * turn % max(data.numel(), 1) // 8 * 8
    data = torch.nn.functional.pad(data[start : start + _WINDOW], (0, -min(data.numel() - start, _WINDOW) % 8))
    words = data.clone().view(torch.int64)
    places = torch.arange(words.numel(), device=words.device) * 2 + 1
    return (words * places).sum()


def _bytes(leaf: Tensor, turn: int) -> Tensor:
    """A tensor's bytes, flat; of a large one that would have to be copied some rows."""
    if not leaf.is_contiguous() and leaf.nbytes > _WINDOW and leaf.ndim and leaf.shape[0] > 1:
        num = max(_WINDOW * leaf.shape[0] // leaf.nbytes, 1)
        start = num * turn % leaf.shape[0]
        leaf = leaf[start : start + num]
    if leaf.is_conj() or leaf.is_neg():
        leaf = leaf.resolve_conj().resolve_neg()
    return leaf.contiguous().view(-1).view(torch.uint8)
