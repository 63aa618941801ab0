"""The stages of a pipeline as text: the modules of each, what is sent between them, and the schedule."""

from __future__ import annotations

import math
from collections import Counter

from plait.backends.eager.passes import eager_graphs
from plait.compile.ir.node_info import info_of
from plait.compile.ir.views import is_view
from plait.compile.rank_program import RankProgram
from plait.compile.stage_costs import estimate_costs
from plait.report.bytes import human_bytes
from plait.spec.action import BACKWARD, FORWARD

_WIDTH = 100  # characters shown of a rank's actions


def describe_stages(program: RankProgram) -> list[str]:
    """Lines of text about the stages; none without a pipeline."""
    pipeline = program.pipeline
    if pipeline is None:
        return []
    costs, num = estimate_costs(pipeline.cells, program.of_cells(eager_graphs(program))), pipeline.cells.num_stages
    each = [costs.forward[i] + costs.backward[i] + costs.weight[i] for i in range(num)]
    lines = ["stages (their share of the cost as estimated; the parameters that lie there)"]
    for stage in range(num):
        names = [name for name, on in pipeline.stages.items() if stage in on]
        held = sum(math.prod(program.sharding.states[name].shape) * program.dtype_of(name).itemsize for name in names)
        ranks = ",".join(str(rank) for rank, _ in pipeline.schedule.holders(stage))
        first, last = stage_modules(program, stage)
        where = first if first == last else f"{first} .. {last}"
        share = each[stage] / (sum(each) or 1.0)
        lines.append(
            f"  {stage:<3} pipeline={ranks:5} {share:6.1%}  {len(names):4} parameters {human_bytes(held):>10}  {where}"
        )
    lines += ["", "between stages (of each microbatch, from one rank)"]
    crossing: Counter[tuple[str, int, int]] = Counter()
    values: Counter[tuple[str, int, int]] = Counter()
    for value in pipeline.cells.values:
        kind, source = value.source
        for target in value.stages():
            way = ("forward" if kind == FORWARD else "backward", source, target)
            crossing[way] += value.num_bytes
            values[way] += 1
    ordered = sorted(crossing, key=lambda way: (way[0] != "forward", way[1], way[2]))
    for way in ordered:
        many = "1 value" if values[way] == 1 else f"{values[way]} values"
        lines.append(f"  {way[0]:9} {way[1]} -> {way[2]}  {human_bytes(crossing[way]):>10}  {many}")
    lines += [] if ordered else ["  nothing"]
    schedule = pipeline.schedule
    lines += ["", f"schedule {schedule.name}, micro={schedule.num_micro}"]
    for rank, actions in enumerate(schedule.ranks):
        text = " ".join(str(action) for action in actions if action.computes)
        lines.append(f"  {rank}: {text if len(text) <= _WIDTH else text[:_WIDTH].rpartition(' ')[0] + ' ...'}")
    return lines


def stage_modules(program: RankProgram, stage: int) -> tuple[str, str]:
    """The modules of the first and the last call of a stage's forward pass."""
    assert program.pipeline is not None
    graphs = program.pipeline.cells.graphs
    for kind in (FORWARD, BACKWARD):
        nodes = graphs[kind, stage].graph.nodes if (kind, stage) in graphs else ()
        own = [n for n in nodes if n.op == "call_function" and info_of(n).stage == stage]
        modules = [info_of(n).module or "the loss" for n in own if not is_view(n)]
        if modules:
            return modules[0], modules[-1]
    return "nothing", "nothing"
