"""What a rank does for its cells: each is a program, called with parameters, buffers, microbatch and sums so far."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from plait.backends.eager.execute import Box
from plait.backends.eager.program import Program
from plait.compile.ops.draw import micro_key
from plait.schedule.readiness import Cell


class CellRunner:
    """Runs the cells of one step on one rank (run.execute.Runner). `gradients` are there when all have run."""

    def __init__(
        self,
        program: Program,
        turns: Mapping[Cell, Sequence[str]],
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
        self._turns = turns
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

    def run_cell(self, cell: Cell, micro: int, box: Box) -> Mapping[str, Tensor]:
        found = self._call(cell, micro, box, self._turns[cell][self._counts[cell]], self._parameters)
        self._counts[cell] += 1
        self._sums[cell] = found["gradient"]
        if self._counts[cell] == len(self._turns[cell]):
            for name, gradient in self._sums.pop(cell).items():
                before = self.gradients.get(name)
                self.gradients[name] = gradient if before is None else before.add_(gradient)
        return found["value"]

    def reduce(self) -> None:
        self._exchange(self.gradients)

    def update(self, micro: int) -> None:
        """The update comes after the step (run.asynchronous has updates within it)."""

    def _call(
        self, cell: Cell, micro: int, box: Box, turn: str, parameters: Mapping[str, Tensor]
    ) -> dict[str, dict[str, Tensor]]:
        found = self._program.call(
            turn,
            self._pipeline.cells.graphs[cell].outputs,
            parameter=parameters,
            buffer=self._buffers,
            batch=self._batches[micro],
            sum=self._sums[cell],
            key=micro_key(self._key, micro),
            scale=self._scale,
            box=box,
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
