"""Runs the cells of one pipelined step on one rank, and keeps the gradients that they sum.

A cell is the forward or backward of one stage. Its graph reads parameters, buffers, one microbatch, the values that
earlier cells saved, and the sums of gradients so far.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from plait.backends.backend import Update
from plait.backends.eager.program import Program
from plait.backends.eager.rewrites.dead_values import SavedValues
from plait.compile.ops.draw import micro_key
from plait.schedule.readiness import Cell
from plait.spec.action import BACKWARD
from plait.spec.schedule import Schedule


class CellRunner:
    """The Runner of a schedule that updates parameters after the step.

    When all cells have run, `gradients` has the sums over all microbatches, by parameter; `losses` has the scalars of
    the loss, by (kind, microbatch).
    """

    def __init__(
        self,
        program: Program,
        micro_graphs: Mapping[Cell, Sequence[str]],
        exchange: Callable[[dict[str, Tensor]], None],
        key: int,
        parameters: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
        batches: Sequence[Mapping[str, Tensor]],
        scale: Tensor | None,
    ) -> None:
        assert program.program.pipeline is not None
        self._program = program
        self._pipeline = program.program.pipeline
        self._micro_graphs = micro_graphs
        self._exchange = exchange
        self._key = key
        self._parameters = parameters
        self._buffers = buffers
        self._batches = batches
        self._scale = scale
        self._counts: Counter[Cell] = Counter()
        self._sums: dict[Cell, dict[str, Tensor]] = defaultdict(dict)
        self.losses: dict[tuple[str, int], Tensor] = {}
        self.aux: dict[tuple[str, str, int], Tensor] = {}  # by kind, name and microbatch
        self.gradients: dict[str, Tensor] = {}

    def run_cell(self, cell: Cell, micro: int, saved: SavedValues) -> Mapping[str, Tensor]:
        """Run the cell on a microbatch and add its gradients to the sums."""
        found = self._call(cell, micro, saved, self._micro_graphs[cell][self._counts[cell]], self._parameters)
        self._counts[cell] += 1
        self._sums[cell] = found["gradient"]
        if self._counts[cell] == len(self._micro_graphs[cell]):
            for name, gradient in self._sums.pop(cell).items():
                before = self.gradients.get(name)
                self.gradients[name] = gradient if before is None else before.add_(gradient)
        return found["value"]

    def reduce(self) -> None:
        """Sum the gradients that other ranks of the pipeline have too."""
        self._exchange(self.gradients)

    def update(self, micro: int) -> None:
        """Nothing: parameters are updated after the step."""

    def _call(
        self, cell: Cell, micro: int, saved: SavedValues, graph: str, parameters: Mapping[str, Tensor]
    ) -> dict[str, dict[str, Tensor]]:
        found = self._program.call(
            graph,
            self._pipeline.cells.graphs[cell].outputs,
            parameter=parameters,
            buffer=self._buffers,
            batch=self._batches[micro],
            sum=self._sums[cell],
            key=micro_key(self._key, micro),
            scale=self._scale,
            saved=saved,
        )
        for name, value in found["buffer"].items():
            self._buffers[name].copy_(value)
        for kind in ("loss", "sum", "weight"):
            for value in found[kind].values():
                self.losses[kind, micro] = value
        for kind in ("aux", "aux_weight"):
            for name, value in found[kind].items():
                self.aux[kind, name, micro] = value
        return found


class StaleRunner(CellRunner):
    """The Runner of an asynchronous pipeline, which updates weights while microbatches are in flight.

    The backward of a microbatch uses the very weights that its forward on this rank used (weight stashing). A rank
    copies its weights before an update only if a microbatch still needs them. So it holds no more versions than the
    definition asks for: num_ranks - rank under PipeDream, two under 2BW (Narayanan et al. 2019, "PipeDream: Generalized
    Pipeline Parallelism for DNN Training"; 2021, "Memory-Efficient Pipeline-Parallel DNN Training").

    `schedule` says which version each microbatch uses and which microbatches are updated together. `update` is called
    with the mean gradients of each such group.
    """

    def __init__(self, *rest: Any, schedule: Schedule, rank: int, update: Update) -> None:
        super().__init__(*rest)
        self._update = update
        self._groups = schedule.groups()
        self._version = {micro: schedule.version(rank, micro) for micro in range(schedule.num_micro)}
        self._users = Counter(
            self._version[a.micro] for a in schedule.ranks[rank] if a.kind == BACKWARD and a.micro is not None
        )  # backwards still to run, by the version that they use
        self._newest = 0
        self._older: dict[int, dict[str, Tensor]] = {}
        self._of_group: dict[int, dict[Cell, dict[str, Tensor]]] = {}  # sums of gradients, by the first microbatch
        self._done: Counter[tuple[int, Cell]] = Counter()
        self.most_versions = 1

    def run_cell(self, cell: Cell, micro: int, saved: SavedValues) -> Mapping[str, Tensor]:
        """Run the cell with the version of the weights that the schedule gives the microbatch."""
        version, (first, num) = self._version[micro], self._groups[micro]
        weights = self._parameters if version == self._newest else self._older[version]
        backward = cell[0] == BACKWARD
        micro_graphs = self._program.program.micro_graphs_of_cell(cell, num if backward else 1)
        if backward:
            self._sums = defaultdict(dict, self._of_group.get(first, {}))
        found = self._call(cell, micro, saved, micro_graphs[self._done[first, cell] if backward else 0], weights)
        if backward:
            self._done[first, cell] += 1
            self._of_group.setdefault(first, {})[cell] = found["gradient"]
            self._users[version] -= 1
            if not self._users[version]:
                self._older.pop(version, None)
        return found["value"]

    def update(self, micro: int) -> None:
        """Update the weights by the mean gradients of the group of this microbatch."""
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
