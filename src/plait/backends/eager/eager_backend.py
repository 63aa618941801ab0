"""Eager execution: each call of a graph is a kernel that runs when Python comes to it."""

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
    """The Backend that runs graphs as Python functions; `homes` is where a rank's tensors are while they are away."""

    def __init__(self, homes: Offload) -> None:
        self._homes = homes

    def graphs(self, program: RankProgram) -> dict[str, Graph]:
        """What runs for the graphs of a program, by their names."""
        return eager_graphs(program)

    def build(self, program: RankProgram, world: World, recorder: TraceRecorder | None = None) -> Executable:
        make = Program if program.pipeline is None else PipelineProgram
        return make(program, self.graphs(program), world, self._homes, recorder)
