"""Asynchronous pipelines: weights are updated while microbatches are under way, so a backward needs older ones.

Every microbatch's backward uses the very weights that its forward on this rank used (weight stashing). A rank copies
its weights before an update only if a microbatch still needs them, so it has no more versions than the definition
asks for: num_ranks - rank under PipeDream, two under 2BW (Narayanan et al. 2019, "PipeDream:
Generalized Pipeline Parallelism for DNN Training"; 2021, "Memory-Efficient Pipeline-Parallel DNN Training").
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from plait.backends.backend import Update
from plait.backends.eager.cell_runner import CellRunner
from plait.backends.eager.execute import Box
from plait.schedule.readiness import Cell
from plait.spec.action import BACKWARD
from plait.spec.schedule import Schedule


class StaleRunner(CellRunner):
    """`schedule` says which version of the weights each microbatch uses and which are updated together; `update` is
    called with the mean gradients of each group."""

    def __init__(self, *rest: Any, schedule: Schedule, rank: int, update: Update) -> None:
        super().__init__(*rest)
        self._update = update
        self._groups = schedule.groups()
        self._version = {micro: schedule.version(rank, micro) for micro in range(schedule.num_micro)}
        self._users = Counter(
            self._version[a.micro] for a in schedule.ranks[rank] if a.kind == BACKWARD and a.micro is not None
        )  # to come
        self._newest = 0
        self._older: dict[int, dict[str, Tensor]] = {}
        self._of_group: dict[int, dict[Cell, dict[str, Tensor]]] = {}  # sums of gradients, by the first microbatch
        self._done: Counter[tuple[int, Cell]] = Counter()
        self.most_versions = 1

    def run_cell(self, cell: Cell, micro: int, box: Box) -> Mapping[str, Tensor]:
        version, (first, num) = self._version[micro], self._groups[micro]
        weights = self._parameters if version == self._newest else self._older[version]
        backward = cell[0] == BACKWARD
        turns = self._program.program.turns_of_cell(cell, num if backward else 1)
        if backward:
            self._sums = defaultdict(dict, self._of_group.get(first, {}))
        found = self._call(cell, micro, box, turns[self._done[first, cell] if backward else 0], weights)
        if backward:
            self._done[first, cell] += 1
            self._of_group.setdefault(first, {})[cell] = found["gradient"]
            self._users[version] -= 1
            if not self._users[version]:
                self._older.pop(version, None)
        return found["value"]

    def update(self, micro: int) -> None:
        first, num = self._groups[micro]
        gradients: dict[str, Tensor] = {}
        for sums in self._of_group.pop(first, {}).values():
            gradients |= sums
        if num > 1 and gradients:
            torch._foreach_div_(list(gradients.values()), float(num))
        if self._users[self._newest]:
            self._older[self._newest] = {name: tensor.clone() for name, tensor in self._parameters.items()}
        self._newest += 1
        self.most_versions = max(self.most_versions, 1 + len(self._older))
        self._update(gradients)
