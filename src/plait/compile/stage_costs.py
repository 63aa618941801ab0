"""Costs of the cells of a pipeline, estimated from their graphs, and a cut of the layers that fits into memory."""

from __future__ import annotations

import bisect
import math
from collections import Counter, defaultdict
from collections.abc import Mapping

from torch.fx import Graph, Node

from plait.compile.ir.calls import placeholders
from plait.compile.ir.dtypes import dtype_named
from plait.compile.ir.estimate import seconds_of
from plait.compile.ir.node_info import info_of, position_of
from plait.compile.rank_program import RankProgram
from plait.compile.stages.assign import neighbour_bandwidth
from plait.cost.costs import Costs
from plait.schedule.cut import Item, Memory, choose_cut
from plait.schedule.in_flight import most_microbatches_in_flight
from plait.schedule.readiness import Cell
from plait.spec.schedule import BACKWARD, FORWARD, WEIGHT


def cut_within(
    program: RankProgram, graphs: Mapping[Cell, Graph], peaks: Mapping[int, int], states: float, limit: int
) -> tuple[str, ...] | None:
    """Find a cut whose stages each take at most `limit` bytes of memory.

    Args:
        program: a program with a pipeline; else there is no cut.
        graphs: the graphs that a backend runs for the cells.
        peaks: the bytes that each rank along the pipeline takes at most now.
        states: bytes of parameters, gradients and optimizer state for each byte of parameters.
        limit: bytes that a rank may take. What a rank takes besides states and activations is subtracted from it.

    Returns:
        The modules to name in `cut=`; None if no cut fits, or if the schedule gives a rank several stages.
    """
    pipeline = program.pipeline
    if pipeline is None or any(len(stages) > 1 for stages in pipeline.schedule.stages):
        return None
    begins = _module_begins(program)
    places = sorted(begins)
    stage_of = [0] * len(places)
    seconds, held, kept = defaultdict[int, float](float), Counter[int](), Counter[int]()

    def item(node: Node) -> int:
        return max(bisect.bisect_right(places, position_of(node)) - 1, 0)

    here = dict.fromkeys(program.plan.mesh.names, 0)
    seen: set[str] = set()
    for (kind, stage), graph in graphs.items():
        named = {node.name: node for node in graph.nodes if info_of(node).stage == stage}
        for node in named.values():
            seconds[item(node)] += seconds_of(node, program.cluster.device)
            if kind == FORWARD:
                stage_of[item(node)] = stage
        if kind != FORWARD:
            continue
        for node in placeholders(graph):
            name = info_of(node).name
            readers = [user for user in node.users if info_of(user).position is not None]
            if info_of(node).kind == "parameter" and readers and name not in seen:
                seen.add(name)
                layout = program.sharding.states[name]
                size = math.prod(layout.local_shape(program.plan.mesh, here)) * dtype_named(layout.dtype).itemsize
                held[item(readers[0])] += int(size * states)
        for value in pipeline.cells.values:
            if (
                value.source == (kind, stage)
                and any(user != FORWARD for user, _ in value.users)
                and value.name in named
            ):
                kept[item(named[value.name])] += value.num_bytes
    items = [Item(seconds[i], held[i], kept[i]) for i in range(len(places))]
    schedule = pipeline.schedule
    in_flight = tuple(
        max(most_microbatches_in_flight(schedule, *place) for place in schedule.holders(stage))
        for stage in range(schedule.num_stages)
    )
    if len(items) < len(in_flight):
        return None
    used: Counter[int] = Counter()
    for one, stage in zip(items, stage_of, strict=True):
        used[stage] += one.state_bytes + one.activation_bytes * in_flight[stage]
    rest = max(peak - used[schedule.stages[rank][0]] for rank, peak in peaks.items())
    found = choose_cut(items, [], len(in_flight), memory=Memory(limit - max(rest, 0), in_flight))
    return None if found is None else tuple(begins[places[i]] for i in found)


def _module_begins(program: RankProgram) -> dict[int, str]:
    """The module that begins at each position; the outermost if several do."""
    assert program.pipeline is not None
    first: dict[str, int] = {}
    for (kind, _), each in program.pipeline.cells.graphs.items():
        for node in each.graph.nodes if kind == FORWARD else ():
            parts = info_of(node).module.split(".")
            for end in range(1, len(parts) + 1) if info_of(node).position is not None and parts[0] else ():
                path = ".".join(parts[:end])
                first[path] = min(first.get(path, position_of(node)), position_of(node))
    found: dict[int, str] = {}
    for path in sorted(first, key=len):
        found.setdefault(first[path], path)
    return found


def estimate_costs(program: RankProgram, graphs: Mapping[Cell, Graph]) -> Costs:
    """Estimate the costs of the stages of a program with a pipeline, for a simulation before anything is measured.

    Seconds are those of the program's cluster; on a CPU they are meaningful as ratios only. `graphs` are those that a
    backend runs for the cells.
    """
    assert program.pipeline is not None
    cells = program.pipeline.cells
    seconds: defaultdict[Cell, float] = defaultdict(float)
    for cell, graph in graphs.items():
        seconds[cell] += sum(seconds_of(node, program.cluster.device) for node in graph.nodes)
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
        bytes_per_second=neighbour_bandwidth(program.cluster, program.plan),
        crossing={(a, b): max(crossing[kind, a, b] for kind in (FORWARD, BACKWARD)) for a, b in sorted(pairs)},
        activation_bytes=tuple(kept[stage] for stage in stages),
        weight_activation_bytes=tuple(for_weight[stage] for stage in stages),
    )
