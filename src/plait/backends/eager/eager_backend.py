"""The eager backend: each call of a graph is a kernel, launched when Python reaches it."""

from __future__ import annotations

from torch.fx import Graph

from plait.backends.backend import Executable
from plait.backends.eager.offload.store import Offload
from plait.backends.eager.passes import eager_graphs
from plait.backends.eager.pipeline_program import PipelineProgram
from plait.backends.eager.program import Program
from plait.backends.recorder import TraceRecorder
from plait.comm.protocol import World
from plait.compile.rank_program import RankProgram


class EagerBackend:
    """A Backend that runs graphs as Python functions. `offload` keeps the rank's tensors that are off its device."""

    def __init__(self, offload: Offload) -> None:
        self._offload = offload

    def graphs(self, program: RankProgram) -> dict[str, Graph]:
        """The graphs that run in place of the program's own, by their names."""
        return eager_graphs(program)

    def build(self, program: RankProgram, world: World, recorder: TraceRecorder | None = None) -> Executable:
        make = Program if program.pipeline is None else PipelineProgram
        return make(program, self.graphs(program), world, self._offload, recorder)
