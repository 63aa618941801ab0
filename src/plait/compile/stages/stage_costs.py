"""What the cells of a pipeline cost, as far as their graphs tell: for a simulation before anything is measured."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping

from torch.fx import Graph

from plait.compile.ir.estimate import seconds_of
from plait.compile.stages.assign import LINK_BYTES_PER_SECOND
from plait.compile.stages.stage_graphs import StageGraphs
from plait.cost.costs import Costs
from plait.schedule.readiness import Cell
from plait.spec.action import BACKWARD, FORWARD, WEIGHT


def estimate_costs(cells: StageGraphs, graphs: Mapping[Cell, Graph]) -> Costs:
    """Seconds of each stage, of which only ratios are meant (compile/ir/estimate.py), bytes that cross and that are
    kept. `graphs` are what a backend runs for the cells."""
    seconds: defaultdict[Cell, float] = defaultdict(float)
    for cell, graph in graphs.items():
        seconds[cell] += sum(seconds_of(node) for node in graph.nodes)
    crossing: Counter[tuple[str, int, int]] = Counter()
    kept, for_weight = Counter[int](), Counter[int]()
    for value in cells.values:
        kind, stage = value.source
        for other in value.stages():
            crossing[kind, min(stage, other), max(stage, other)] += value.num_bytes
        for reader in {reader for kind_of, reader in value.users if kind_of != FORWARD}:
            if kind == FORWARD:
                kept[reader] += value.num_bytes
                for_weight[reader] += value.num_bytes if (WEIGHT, reader) in value.users else 0
    pairs = {(a, b) for _, a, b in crossing}
    stages = range(cells.num_stages)
    return Costs(
        tuple(float(seconds[FORWARD, stage]) for stage in stages),
        tuple(float(seconds[BACKWARD, stage]) for stage in stages),
        tuple(float(seconds[WEIGHT, stage]) for stage in stages),
        bytes_per_second=LINK_BYTES_PER_SECOND,
        crossing={(a, b): max(crossing[kind, a, b] for kind in (FORWARD, BACKWARD)) for a, b in sorted(pairs)},
        activation_bytes=tuple(kept[stage] for stage in stages),
        weight_activation_bytes=tuple(for_weight[stage] for stage in stages),
    )
