"""The inductor backend: eager execution with compiled regions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor
from torch.fx import Graph

from plait.backends.backend import Executable, StepResult, Update
from plait.backends.eager.eager_backend import EagerBackend
from plait.backends.inductor.inductor_passes import inductor_graphs
from plait.backends.recorder import TraceRecorder
from plait.comm.protocol import World
from plait.compile.rank_program import RankProgram


class InductorBackend(EagerBackend):
    """A Backend that compiles the regions of a graph between collectives."""

    def graphs(self, program: RankProgram) -> dict[str, Graph]:
        """The graphs that run in place of the program's own, by their names."""
        return inductor_graphs(program)[0]

    def build(self, program: RankProgram, world: World, recorder: TraceRecorder | None = None) -> Executable:
        executable = super().build(program, world, recorder)
        return executable if program.plan.cudagraphs == "no" else _Replaying(executable)


class _Replaying:
    """An Executable whose regions are recorded as CUDA graphs. The memory of a step's values is used again by the next
    step, which begins when this says so."""

    def __init__(self, executable: Executable) -> None:
        self._executable = executable

    @property
    def program(self) -> RankProgram:
        return self._executable.program

    @property
    def collective_order(self) -> str:
        return self._executable.collective_order

    def run(
        self,
        key: int,
        parameters: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
        batches: Iterable[Mapping[str, Tensor]],
        scale: Tensor | None = None,
        update: Update | None = None,
    ) -> list[StepResult]:
        torch.compiler.cudagraph_mark_step_begin()
        return self._executable.run(key, parameters, buffers, batches, scale, update)
