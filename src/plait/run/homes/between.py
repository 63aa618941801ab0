"""What a pipeline's stages keep of microbatches in flight, away from the device between forward and backward.

What is large leaves after the forward of a microbatch, and comes back while the rank runs the action before the
backward. Each microbatch in flight has a slot of its own, so that the room needed is known before the first step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from plait.decide.pages import padded
from plait.graph.cells import Value
from plait.graph.homes import Coming, is_large
from plait.run.execute import Box
from plait.run.homes.homes import Homes
from plait.spec.action import BACKWARD, FORWARD
from plait.spec.schedule import Schedule

_Part = tuple[str, int]  # a value's name, and which tensor of it


class Between:
    """Of one rank (run.execute.Keeper). HomeError where the disk has no room for all that may be away at once."""

    def __init__(self, homes: Homes, schedule: Schedule, rank: int, values: Sequence[Value]) -> None:
        self._homes = homes
        self._offsets: dict[int, dict[_Part, int]] = {}  # by stage, within a slot
        self._slots: dict[int, list[int]] = {}  # where the free ones begin, by stage
        self._taken: dict[tuple[int, int], int] = {}  # by microbatch and stage, as what follows
        self._away: dict[tuple[int, int], dict[_Part, Any]] = {}
        self._coming: dict[tuple[int, int], Coming] = {}
        total = 0
        for chunk, stage in enumerate(schedule.stages[rank]):
            offsets: dict[_Part, int] = {}
            size = 0
            for value in values:
                if any(kind != FORWARD and on == stage for kind, on in value.users):
                    for index, tensor in enumerate(_tensors(value.like)):
                        if tensor is not None and is_large(tensor.numel()):
                            offsets[value.name, index] = size
                            size += padded(tensor.numel() * tensor.itemsize)
            num = _most_in_flight(schedule, rank, chunk)
            self._offsets[stage] = offsets
            self._slots[stage] = [total + slot * size for slot in range(num)]
            total += num * size
        homes.make_room(total)

    def leave(self, micro: int, stage: int, box: Box) -> None:
        """After a forward whose backward is not what the rank does next."""
        here = {part: at for part, at in self._offsets[stage].items() if part[0] in box}
        if not here:
            return
        slot = self._taken[micro, stage] = self._slots[stage].pop()
        away = self._away[micro, stage] = {}
        for (name, index), offset in here.items():
            tensors = _tensors(box[name])
            away[name, index] = self._homes.stash(slot + offset, tensors[index])
            tensors[index] = None
            box[name] = tensors if isinstance(box[name], (tuple, list)) else None  # type: ignore[assignment]

    def begin(self, micro: int, stage: int) -> None:
        """One action before the backward."""
        if (micro, stage) in self._away and (micro, stage) not in self._coming:
            self._coming[micro, stage] = self._homes.unstash(list(self._away[micro, stage].values()))

    def back(self, micro: int, stage: int, box: Box) -> None:
        """Before the backward."""
        self.begin(micro, stage)
        away = self._away.pop((micro, stage), None)
        if away is None:
            return
        for (name, index), tensor in zip(away, self._coming.pop((micro, stage)).wait(), strict=True):
            if isinstance(box[name], list):
                box[name][index] = tensor  # type: ignore[index]
            else:
                box[name] = tensor
        self._slots[stage].append(self._taken.pop((micro, stage)))


def _tensors(value: Any) -> list[Any]:
    """Of a value that is one tensor, or several."""
    return list(value) if isinstance(value, (tuple, list)) else [value]


def _most_in_flight(schedule: Schedule, rank: int, chunk: int) -> int:
    """The most microbatches that have been forward and not yet backward through a chunk."""
    now = most = 0
    for action in schedule.ranks[rank]:
        if action.chunk == chunk and action.kind in (FORWARD, BACKWARD):
            now += 1 if action.kind == FORWARD else -1
            most = max(most, now)
    return most
