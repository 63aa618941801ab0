"""Which backend executes a plan."""

from __future__ import annotations

from torch.fx import Graph

from plait.backends.backend import Backend
from plait.backends.eager.eager_backend import EagerBackend
from plait.backends.eager.offload.store import Offload
from plait.backends.eager.passes import EAGER_PASSES, EagerDraft, eager_graphs, make_eager
from plait.backends.inductor.inductor_backend import (
    INDUCTOR_PASSES,
    InductorBackend,
    inductor_graphs,
    make_with_regions,
)
from plait.backends.inductor.region_compiler import CompileReport
from plait.compile.pass_base import Pass, Watcher
from plait.compile.rank_program import RankProgram
from plait.plan.plan import Plan


def backend_of(plan: Plan, offload: Offload) -> Backend:
    """The backend that a plan names. `offload` keeps the rank's tensors that are off its device."""
    return EagerBackend(offload) if plan.compile == "none" else InductorBackend(offload)


def chooses_collectives(plan: Plan) -> bool:
    """Whether the backend of a plan takes the layouts alone, and inserts collectives of its own choice."""
    return plan.backend == "xla"


def passes_of(plan: Plan) -> tuple[Pass[EagerDraft], ...]:
    """The passes of the backend of a plan, in order; none if it takes the layouts alone."""
    if chooses_collectives(plan):
        return ()
    return EAGER_PASSES if plan.compile == "none" else INDUCTOR_PASSES


def make_graphs(program: RankProgram, watcher: Watcher) -> dict[str, Graph]:
    """Make the graphs that the backend of a program's plan runs anew, without compiling regions. `watcher` is told of
    every pass. A backend that takes the layouts alone has none."""
    if chooses_collectives(program.plan):
        return {}
    return make_eager(program, watcher) if program.plan.compile == "none" else make_with_regions(program, watcher)


def compile_report(program: RankProgram) -> CompileReport | None:
    """What compiling the regions of a program took, which this compiles if it is not; None if the plan has none."""
    return None if program.plan.compile == "none" else inductor_graphs(program)[1]


def graphs_of(program: RankProgram) -> dict[str, Graph]:
    """The graphs that the backend of a program's plan runs, by the names of the program's own."""
    return eager_graphs(program) if program.plan.compile == "none" else inductor_graphs(program)[0]
