"""Offloads the activations of a pipeline's stages between the forward and the backward of a microbatch.

Large tensors leave the device after the forward, and come back while the rank runs the action before the backward. Each
microbatch in flight has its own slot, so the room needed on disk is known before the first step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from plait.backends.eager.offload.store import Offload
from plait.backends.eager.rewrites.dead_values import SavedValues
from plait.backends.eager.rewrites.offload_rewrites import Arrival
from plait.compile.stages.stage_graphs import Value
from plait.cost.memory_model import padded
from plait.plan.sharding_plan import is_large
from plait.schedule.in_flight import most_microbatches_in_flight
from plait.spec.schedule import BACKWARD, FORWARD, Schedule


@dataclass
class _Offloaded:
    """A saved value of which some tensors are offloaded."""

    tensors: list[Any]  # None in place of those that are offloaded
    tokens: dict[int, Any]  # what brings those back, by index
    is_tuple: bool  # whether the value is a tuple of tensors, or one tensor


class PipelineActivations:
    """The offloaded activations of one rank. HomeError if the disk has no room for all that can be away at once."""

    def __init__(self, offload: Offload, schedule: Schedule, rank: int, values: Sequence[Value]) -> None:
        self._offload = offload
        self._offsets: dict[int, dict[str, dict[int, int]]] = {}  # within a slot, by stage, value and tensor
        self._free: dict[int, list[int]] = {}  # offsets of the free slots, by stage
        self._taken: dict[tuple[int, int], int] = {}  # offset of the slot, by (microbatch, stage)
        self._away: dict[tuple[int, int], dict[str, _Offloaded]] = {}  # by (microbatch, stage) and value
        self._arriving: dict[tuple[int, int], Arrival] = {}  # by (microbatch, stage)
        total = 0
        for chunk, stage in enumerate(schedule.stages[rank]):
            offsets: dict[str, dict[int, int]] = {}
            size = 0
            for value in values:
                if any(kind != FORWARD and on == stage for kind, on in value.users):
                    for index, tensor in enumerate(_tensors(value.like)):
                        if tensor is not None and is_large(tensor.numel()):
                            offsets.setdefault(value.name, {})[index] = size
                            size += padded(tensor.numel() * tensor.itemsize)
            num = most_microbatches_in_flight(schedule, rank, chunk, last=BACKWARD)
            self._offsets[stage] = offsets
            self._free[stage] = [total + slot * size for slot in range(num)]
            total += num * size
        offload.make_room(total)

    def leave(self, micro: int, stage: int, saved: SavedValues) -> None:
        """Offload large saved values, after a forward whose backward is not the rank's next action."""
        here = {name: offsets for name, offsets in self._offsets[stage].items() if name in saved}
        if not here:
            return
        slot = self._taken[micro, stage] = self._free[stage].pop()
        away = self._away[micro, stage] = {}
        for name, offsets in here.items():
            value = saved.pop(name)
            tensors = _tensors(value)
            tokens = {index: self._offload.stash(slot + at, tensors[index]) for index, at in offsets.items()}
            stay = [None if index in tokens else tensor for index, tensor in enumerate(tensors)]
            away[name] = _Offloaded(stay, tokens, isinstance(value, (tuple, list)))

    def begin(self, micro: int, stage: int) -> None:
        """Start to bring the values back, one action before the backward."""
        if (micro, stage) in self._away and (micro, stage) not in self._arriving:
            tokens = [token for value in self._away[micro, stage].values() for token in value.tokens.values()]
            self._arriving[micro, stage] = self._offload.unstash(tokens)

    def back(self, micro: int, stage: int, saved: SavedValues) -> None:
        """Put the values back among the saved ones, before the backward."""
        self.begin(micro, stage)
        away = self._away.pop((micro, stage), None)
        if away is None:
            return
        arrived = iter(self._arriving.pop((micro, stage)).wait())
        for name, value in away.items():
            for index in value.tokens:
                value.tensors[index] = next(arrived)
            saved[name] = tuple(value.tensors) if value.is_tuple else value.tensors[0]  # type: ignore[assignment]
        self._free[stage].append(self._taken.pop((micro, stage)))


def _tensors(value: object) -> list[Any]:
    """The tensors of a value that is one tensor or a sequence."""
    return list(value) if isinstance(value, (tuple, list)) else [value]
