"""What a pipeline's stages keep of microbatches in flight, away from the device between forward and backward.

What is large leaves after the forward of a microbatch, and comes back while the rank runs the action before the
backward. Each microbatch in flight has a slot of its own, so that the room needed is known before the first step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from plait.backends.eager.execute import Box
from plait.backends.eager.offload.store import Offload
from plait.backends.eager.rewrites.offload_ops import Coming
from plait.compile.stages.stage_graphs import Value
from plait.cost.memory_model import padded
from plait.plan.sharding_plan import is_large
from plait.schedule.in_flight import most_microbatches_in_flight
from plait.spec.action import BACKWARD, FORWARD
from plait.spec.schedule import Schedule


@dataclass
class _Away:
    """A value of which some tensors are away: those that stay here, and what brings the others back, by place."""

    tensors: list[Any]
    tokens: dict[int, Any]
    several: bool  # whether the value is a tuple of tensors, or one


class Between:
    """Of one rank (run.execute.Keeper). HomeError where the disk has no room for all that may be away at once."""

    def __init__(self, homes: Offload, schedule: Schedule, rank: int, values: Sequence[Value]) -> None:
        self._homes = homes
        self._offsets: dict[int, dict[str, dict[int, int]]] = {}  # by stage, value and tensor of it, within a slot
        self._slots: dict[int, list[int]] = {}  # where the free ones begin, by stage
        self._taken: dict[tuple[int, int], int] = {}  # by microbatch and stage, as what follows
        self._away: dict[tuple[int, int], dict[str, _Away]] = {}
        self._coming: dict[tuple[int, int], Coming] = {}
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
            self._slots[stage] = [total + slot * size for slot in range(num)]
            total += num * size
        homes.make_room(total)

    def leave(self, micro: int, stage: int, box: Box) -> None:
        """After a forward whose backward is not what the rank does next."""
        here = {name: offsets for name, offsets in self._offsets[stage].items() if name in box}
        if not here:
            return
        slot = self._taken[micro, stage] = self._slots[stage].pop()
        away = self._away[micro, stage] = {}
        for name, offsets in here.items():
            value = box.pop(name)
            tensors = _tensors(value)
            tokens = {index: self._homes.stash(slot + at, tensors[index]) for index, at in offsets.items()}
            stay = [None if index in tokens else tensor for index, tensor in enumerate(tensors)]
            away[name] = _Away(stay, tokens, isinstance(value, (tuple, list)))

    def begin(self, micro: int, stage: int) -> None:
        """One action before the backward."""
        if (micro, stage) in self._away and (micro, stage) not in self._coming:
            tokens = [token for value in self._away[micro, stage].values() for token in value.tokens.values()]
            self._coming[micro, stage] = self._homes.unstash(tokens)

    def back(self, micro: int, stage: int, box: Box) -> None:
        """Before the backward."""
        self.begin(micro, stage)
        away = self._away.pop((micro, stage), None)
        if away is None:
            return
        came = iter(self._coming.pop((micro, stage)).wait())
        for name, value in away.items():
            for index in value.tokens:
                value.tensors[index] = next(came)
            box[name] = tuple(value.tensors) if value.several else value.tensors[0]  # type: ignore[assignment]
        self._slots[stage].append(self._taken.pop((micro, stage)))


def _tensors(value: Any) -> list[Any]:
    """Of a value that is one tensor, or several."""
    return list(value) if isinstance(value, (tuple, list)) else [value]
