"""Checks at every step that ranks which must train on the same batch do so. A checksum of the batch is exchanged
during the step.

A plain batch is the global batch, and must be equal on every rank. With a LocalBatch, all ranks must be at the same
place in the data, and ranks with the same part of the batch (those of tensor and pipeline) must have the same rows.

Small tensors are read completely. Of a large tensor, the checksum reads a window that moves on with every step, and
blocks spread over the rest. A tensor on a GPU is read there, and its checksum is compared one step later, so that the
host does not wait for it.
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

_WHOLE = 1 << 20  # bytes up to which a tensor is read completely, by a checksum that detects every change
_WINDOW = 16 << 20  # bytes that are added up of a larger tensor
_BLOCK, _NUM_BLOCKS = 4096, 64
_PRIME = 0x9E3779B97F4A7C15
_MASK = (1 << 63) - 1

_DATA = "place in the data"
_GLOBAL = (
    "a plain batch is the global one, the same on every rank: seed its loader alike, or use plait.loader, which gives"
    " each rank its rows"
)
_PLACE = (
    "give plait.loader the same arguments on every rank, and take the same number of batches from it; a number of a"
    " batch must be the same on every rank, so let what differs be a tensor"
)
_ROWS = (
    "ranks with the same part of the batch must read the same rows: let the dataset give the same item for the same"
    " index on every rank, with random changes seeded by the index"
)


@dataclass
class _Sent:
    """The summary of a batch that this rank has sent, and the summaries of the ranks of each group.

    batch     the batch in words
    gathered  per group, [ranks, 4] int64 (is local, place, part, checksum), or the work that gathers it
    ready     a CUDA event after which the summaries are on the host
    """

    step: str
    batch: str
    is_local: bool
    gathered: list[tuple[Comm, Tensor | Work]]
    ready: Any = None


class SameBatch:
    """Compares the batches of one rank with those of the other ranks."""

    def __init__(self, world: World, plan: Plan) -> None:
        self._world, self._plan = world, plan
        # Replicas that synchronise less often may be at different steps. They compare occasionally, and the ranks
        # within a replica at every step.
        self._relaxed = plan.relaxed_axis
        if world.mesh.size == 1:
            self._groups: list[Comm] = []
        elif self._relaxed:
            axes = [axis for axis in world.mesh.names if axis != self._relaxed and world.mesh.axis_size(axis) > 1]
            self._groups = [world.comm(axis) for axis in axes]
        else:
            self._groups = [world.everyone()]
        self._behind = not is_host(world.device)  # checksums of a GPU are compared one step later
        self._sent: _Sent | None = None
        self._num_batches = self._chained = 0
        self._step = ""  # the step or evaluation that this rank is in

    def awaited(self) -> AbstractContextManager[object]:
        """Context for waiting on a GPU result, which exists only once the other ranks have begun the step."""
        monitor = self._world.monitor
        if monitor is None or is_host(self._world.device) or self._relaxed:
            return nullcontext()
        return monitor.waiting(self._step, functools.partial(monitor.behind_step, monitor.num_steps))

    def begin(self, batch: Any, step: str) -> None:
        """Report to the other ranks that this rank begins `step`, a step or an evaluation, and send the batch's
        summary.

        Raises WorldError if the batches of the previous step differed.
        """
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
        content = checksum(batch.tree if local else batch, self._num_batches)
        if self._relaxed:
            self._compare_occasionally(batch, place if local else content, local)
        self._num_batches += 1
        if not self._groups:
            return
        header = torch.tensor([int(local), place, self._part()])
        if torch.is_tensor(content):
            header = header.to(content.device, non_blocking=True)
            summary = torch.cat([header, content.reshape(1)]).to(self._world.device, non_blocking=True)
        else:
            summary = torch.cat([header, torch.tensor([content])]).to(self._world.device, non_blocking=True)
        works = [(group, group.all_gather(summary)) for group in self._groups]
        self._sent = _Sent(step, what, local, list(works))
        if self._behind:
            found = [(group, work.wait()) for group, work in works]
            host = [pinned_like(t, t.device).copy_(t, non_blocking=True) for _, t in found]
            self._sent.gathered = [(group, t) for (group, _), t in zip(found, host, strict=True)]
            self._sent.ready = Event(self._world.device)

    def check(self, late: bool = False) -> None:
        """Raise WorldError, on all ranks of a group, if the batches of its ranks differ. On a GPU this waits for
        `late`."""
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
        """What differs between the summaries, the remedy, and each rank's value in words; all empty if the batches
        agree."""
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
        """The index of this rank's part of the batch."""
        return int(self._plan.batch_part(self._plan.mesh.coordinates(self._world.rank)))

    def _compare_occasionally(self, batch: Any, said: int | Tensor, local: bool) -> None:
        """Compare all replicas' batches so far, at steps 0, 1, 2, 4, 8...; for replicas that synchronise less often."""
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
    """The place of the batch in the data, and the Python numbers in it, which all ranks have."""
    numbers = batch_numbers(batch.tree)
    return f"{batch.place} with {numbers}" if numbers else batch.place


def checksum(batch: Any, step_index: int) -> int | Tensor:
    """A 63-bit checksum, which changes with any change of a small tensor, and with nearly any change of a large one."""
    found, on_device = 0, None
    for leaf in batch_leaves(batch).values():
        if is_host(leaf.device):
            found = (found * _PRIME + _of_host(leaf.detach(), step_index)) & _MASK
        else:
            one = _of_device(leaf.detach(), step_index)
            on_device = one if on_device is None else on_device * 31 + one
    return found if on_device is None else (on_device + found) & _MASK


def _of_host(leaf: Tensor, step_index: int) -> int:
    data = _bytes(leaf, step_index).numpy()
    if data.nbytes <= _WHOLE:
        return zlib.crc32(data.data)
    start = _WINDOW * step_index % data.nbytes // 8 * 8
    window = data[start : start + _WINDOW]
    total = int(window[: window.nbytes // 8 * 8].view(np.uint64).sum(dtype=np.uint64))
    total ^= zlib.crc32(window[-8:].data)
    for at in np.random.default_rng(step_index).integers(0, data.nbytes - _BLOCK, _NUM_BLOCKS):
        total = (total * 31 + zlib.crc32(data[at : at + _BLOCK].data)) & _MASK
    return total & _MASK


def _of_device(leaf: Tensor, step_index: int) -> Tensor:
    """The checksum of a tensor on a device, as a 0-d tensor there, so that the host does not wait."""
    data = _bytes(leaf, step_index)
    start = _WINDOW * step_index % max(data.numel(), 1) // 8 * 8
    data = torch.nn.functional.pad(data[start : start + _WINDOW], (0, -min(data.numel() - start, _WINDOW) % 8))
    words = data.clone().view(torch.int64)
    places = torch.arange(words.numel(), device=words.device) * 2 + 1
    return (words * places).sum()


def _bytes(leaf: Tensor, step_index: int) -> Tensor:
    """The tensor's bytes as a flat tensor; of a large non-contiguous tensor only some rows, because it must be
    copied."""
    if not leaf.is_contiguous() and leaf.nbytes > _WINDOW and leaf.ndim and leaf.shape[0] > 1:
        num = max(_WINDOW * leaf.shape[0] // leaf.nbytes, 1)
        start = num * step_index % leaf.shape[0]
        leaf = leaf[start : start + num]
    if leaf.is_conj() or leaf.is_neg():
        leaf = leaf.resolve_conj().resolve_neg()
    return leaf.contiguous().view(-1).view(torch.uint8)
