"""The inductor backend: the graphs of eager execution, in which regions are compiled.

All that eager execution adds stays as it is: buckets, early starts and late waits, gathers ahead of use, offloading.
Only runs of tensor calls between those are replaced (regions.py).
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import Graph, Node

from plait.backends.backend import Executable, StepResult, Update
from plait.backends.eager.eager_backend import EagerBackend
from plait.backends.eager.passes import EAGER_PASSES, EagerDraft
from plait.backends.inductor.region_compiler import CompileReport, compile_regions
from plait.backends.inductor.region_graph import (
    RegionFunction,
    graph_of_region,
    own_results,
    text_of,
    with_regions,
)
from plait.backends.inductor.regions import FusedRegion, free_views, regions_of
from plait.backends.recorder import TraceRecorder
from plait.comm.protocol import World
from plait.compile.ir.calls import copy_graph, is_view
from plait.compile.ir.node_info import info_of
from plait.compile.ir.rewriting import collection_paused
from plait.compile.pass_base import Pass, Watcher, run_passes
from plait.compile.rank_program import RankProgram
from plait.plan.sharding_plan import Gather


def _form_regions(draft: EagerDraft) -> None:
    program = draft.program
    apart = [pattern for pattern, _ in program.plan.uncompiled]
    functions: dict[tuple[str, int | None], RegionFunction] = {}
    for part in draft.parts.values():
        views = free_views(part.graph)
        steps = regions_of(part.graph, views, apart)
        mine: dict[FusedRegion, RegionFunction] = {}
        for region in [step for step in steps if isinstance(step, FusedRegion)]:
            graph = graph_of_region(region, views)
            key = text_of(graph), len(functions) if _replays(draft) else None
            fixed = [index for index, node in enumerate(region.inputs) if _is_fixed(node, program)]
            function = RegionFunction(graph, key[0], tuple(fixed) if _replays(draft) else (), key[1])
            mine[region] = functions.setdefault(key, function)
        part.graph = with_regions(part.graph, steps, mine)


def _own_results(draft: EagerDraft) -> None:
    for part in draft.parts.values():
        part.graph = own_results(part.graph, [i for i, output in enumerate(part.outputs) if output.kind != "value"])


def _replays(draft: EagerDraft) -> bool:
    return draft.program.plan.cudagraphs == "yes"


def _is_fixed(node: Node, program: RankProgram) -> bool:
    """Whether a tensor is a parameter that the graph reads where the optimizer writes it, at every call."""
    parameter = program.sharding.parameters.get(info_of(node).name)
    if node.op != "placeholder" or info_of(node).kind != "parameter" or parameter is None:
        return False
    if program.pipeline is not None and program.pipeline.schedule.asynchronous:
        return False  # an older version may be read
    away = info_of(node).name in program.sharding.away
    return parameter.gather is Gather.NEVER and parameter.narrow is None and not away


INDUCTOR_PASSES = (
    *EAGER_PASSES,
    Pass("form-regions", "joins the calls between collectives in regions, which are compiled", _form_regions,
         ["buckets", "sums in place"], ["regions"]),
    Pass("own-results", "copies results out of memory that CUDA graphs write again", _own_results, ["regions"],
         when=_replays),
)  # fmt: skip

_made: WeakKeyDictionary[RankProgram, tuple[dict[str, Graph], CompileReport]] = WeakKeyDictionary()
_lock = threading.Lock()


def inductor_graphs(program: RankProgram) -> tuple[dict[str, Graph], CompileReport]:
    """The graphs that the inductor backend runs for a program, by the names of the program's own, and what compiling
    their regions took. Ranks that are threads share them.

    Raises PlanError for what Inductor cannot compile.
    """
    with _lock:
        if program not in _made:
            graphs = make_with_regions(program)
            _made[program] = graphs, compile_regions(functions_of(graphs), program.plan)
        return _made[program]


@collection_paused()
def make_with_regions(program: RankProgram, watcher: Watcher | None = None) -> dict[str, Graph]:
    """The graphs of a program with functions of regions that are not compiled yet. `watcher` is told of every pass."""
    parts = {name: replace(part, graph=copy_graph(part.graph)) for name, part in program.graphs.items()}
    draft = EagerDraft(program, parts)
    run_passes(INDUCTOR_PASSES, draft, watcher)
    return {name: part.graph for name, part in draft.parts.items()}


def functions_of(graphs: Mapping[str, Graph]) -> list[RegionFunction]:
    """The functions of the regions of some graphs, one entry a call."""
    nodes = [node for graph in graphs.values() for node in graph.nodes]
    return [node.target for node in nodes if isinstance(node.target, RegionFunction)]


def describe_regions(program: RankProgram) -> list[str]:
    """Lines about the regions that compiling a program would make; nothing is compiled."""
    graphs = make_with_regions(program)
    functions = functions_of(graphs)
    num_calls = sum(each.num_calls for each in functions)
    left = Counter(
        str(node.target)
        for graph in graphs.values()
        for node in graph.nodes
        if isinstance(node.target, OpOverload) and not is_view(node)
    )
    lines = [
        f"compile={program.plan.compile}: {len(functions)} regions of {num_calls} calls, {len({*functions})} different"
    ]
    if left:
        lines.append(f"  not in regions: {', '.join(f'{op} ({num})' for op, num in sorted(left.items()))}")
    return lines


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
