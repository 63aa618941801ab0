"""The inductor backend: eager execution with compiled regions."""

from __future__ import annotations

from torch.fx import Graph

from plait.backends.eager.eager_backend import EagerBackend
from plait.backends.inductor.inductor_passes import inductor_graphs
from plait.compile.rank_program import RankProgram


class InductorBackend(EagerBackend):
    """A Backend that compiles the regions of a graph between collectives."""

    def graphs(self, program: RankProgram) -> dict[str, Graph]:
        """The graphs that run in place of the program's own, by their names."""
        return inductor_graphs(program)[0]
