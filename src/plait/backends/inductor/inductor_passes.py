"""What the inductor backend runs: the graphs of eager execution, in which regions are compiled.

All that eager execution adds stays as it is: buckets, early starts and late waits, gathers ahead of use, offloading.
Only runs of tensor calls between those are replaced (regions.py).
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from weakref import WeakKeyDictionary

from torch._ops import OpOverload
from torch.fx import Graph

from plait.backends.eager.passes import EAGER_PASSES, EagerDraft
from plait.backends.inductor.region_compiler import CompileReport, compile_regions
from plait.backends.inductor.region_graph import RegionFunction, graph_of_region, text_of, with_regions
from plait.backends.inductor.regions import FusedRegion, free_views, regions_of
from plait.compile.ir.calls import copy_graph
from plait.compile.ir.gc_paused import collection_paused
from plait.compile.ir.views import is_view
from plait.compile.pass_manager import Pass, Watcher, run_passes
from plait.compile.rank_program import RankProgram


def _form_regions(draft: EagerDraft) -> None:
    apart = [pattern for pattern, _ in draft.program.plan.uncompiled]
    functions: dict[str, RegionFunction] = {}  # by text
    for part in draft.parts.values():
        views = free_views(part.graph)
        steps = regions_of(part.graph, views, apart)
        mine: dict[FusedRegion, RegionFunction] = {}
        for region in [step for step in steps if isinstance(step, FusedRegion)]:
            graph = graph_of_region(region, views)
            text = text_of(graph)
            mine[region] = functions.setdefault(text, RegionFunction(graph, text))
        part.graph = with_regions(part.graph, steps, mine)


INDUCTOR_PASSES = (
    *EAGER_PASSES,
    Pass("form-regions", "joins the calls between collectives in regions, which are compiled", _form_regions,
         ["buckets", "sums in place"], ["regions"]),
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
