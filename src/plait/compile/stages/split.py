"""Pipelines: the local graph of a step is split into cells, and each parameter gets the ranks of its stages."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch
from torch.fx import Graph, Node

from plait.compile.capture.captured import Captured
from plait.compile.ir.calls import is_tensor, may_alias, placeholders, view_anew
from plait.compile.ir.node_info import describe, info_of, is_backward
from plait.compile.stages.assign import complete_places, follow_readers, place_in_stages, repeatable, stages_from
from plait.compile.stages.stage_graphs import StageGraphs, split_cells
from plait.errors import PlanError, Refusal
from plait.plan.axes import stage_axis
from plait.plan.key_values import Places, ScheduleName
from plait.plan.plan import Plan
from plait.schedule.check import check_schedule
from plait.schedule.families import make_replicated, make_schedule
from plait.schedule.readiness import Cell
from plait.schedule.transfers import add_transfers, add_updates
from plait.spec.cluster import Cluster
from plait.spec.layout import Layout, Only, Placement
from plait.spec.schedule import FORWARD, WEIGHT, Action, Schedule
from plait.spec.text_files import TABLES, read_bounded

aten = torch.ops.aten


@dataclass(frozen=True)
class Pipeline:
    """A step that is split into cells, and the schedule by which the ranks of the pipeline axis run them."""

    cells: StageGraphs
    schedule: Schedule
    stages: Mapping[str, tuple[int, ...]]  # of each parameter, by name

    @cached_property
    def groups(self) -> Mapping[int, tuple[int, int]]:
        """The groups of microbatches between two updates, for an asynchronous schedule (see `Schedule.groups`)."""
        return self.schedule.groups()

    @cached_property
    def added_up(self) -> frozenset[str]:
        """The parameters whose gradient is a sum over several cells or several ranks of the pipeline axis."""
        return self.cells.added_up | {name for name in self.stages if len(self.ranks_of(name)) > 1}

    def num_micro(self, cell: Cell) -> frozenset[int]:
        """The numbers of microbatches on which ranks run a cell; ranks that share a stage may have different ones."""
        if self.schedule.asynchronous:
            return frozenset(num for _, num in self.groups.values())
        return frozenset(self.schedule.num_micro_of(rank, chunk) for rank, chunk in self.schedule.holders(cell[1]))

    def ranks_of(self, name: str) -> tuple[int, ...]:
        """The ranks along the pipeline axis that have the parameter."""
        found = {rank for stage in self.stages[name] for rank, _ in self.schedule.holders(stage)}
        return tuple(sorted(found))

    def placed(self, name: str, layout: Layout) -> Layout:
        """The layout of a parameter, with its placement along the pipeline axis added."""
        first, *others = self.ranks_of(name)
        if len(others) + 1 == self.schedule.num_ranks:
            return layout
        where: Placement = Only(first, tuple(others))
        return replace(layout, placements=((stage_axis(), where), *layout.placements))


def schedule_of(plan: Plan, train: bool = True) -> Schedule:
    """The schedule that a plan names, without transfers: for training, or with forward passes only.

    Raises:
        PlanError: the file cannot be read, or its schedule is for another number of ranks or microbatches.
        ScheduleError: the schedule is not valid for these ranks and microbatches.
    """
    named = not ScheduleName.is_file(plan.schedule)
    found = _named(plan) if named else _from_file(plan.schedule)
    if not train:
        ranks = tuple(tuple(a for a in acts if a.kind == FORWARD and _micro(a) < plan.micro) for acts in found.ranks)
        return Schedule("forward-only", plan.micro, found.stages, ranks)
    if not named and (found.num_ranks, found.num_micro) != (sum(plan.copies), plan.micro):
        what = f"schedule={plan.schedule} is for {found.num_ranks} ranks and {found.num_micro} microbatches"
        has = f"pipeline={Places().show(plan.pipeline)} micro={plan.micro}"
        raise PlanError(Refusal(f"{what}, but the plan has {has}", "", "change one of them"))
    return found


def _named(plan: Plan) -> Schedule:
    chunks = plan.chunks if plan.chunks > 1 else None
    if max(plan.copies) > 1:
        return make_replicated(plan.schedule, plan.copies, plan.micro, chunks)
    return make_schedule(plan.schedule, len(plan.copies), plan.micro, chunks)


def _from_file(path: str) -> Schedule:
    try:
        return Schedule.parse(read_bounded(Path(path), TABLES))
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else error.reason
        raise PlanError(f"schedule={path}: cannot read the file: {why}; give the path of a schedule") from None


def _micro(action: Action) -> int:
    assert action.micro is not None
    return action.micro


def cut_in_stages(
    graph: Graph,
    captured: Captured,
    plan: Plan,
    cluster: Cluster,
    settled: Mapping[str, tuple[int, ...]] | None = None,
    begins: list[float] | None = None,
) -> tuple[Schedule, list[float]]:
    """Assign a stage to each call of a step. Returns the schedule, and the positions at which stages begin.

    Args:
        cluster: where the step runs.
        settled: the stages of parameters, as an earlier batch decided them.
        begins: the positions at which stages begin, if they are known already.
    """
    train = any(output.kind == "gradient" for output in captured.outputs)
    schedule = schedule_of(plan, train)
    written = _written(captured)
    complete_places(graph)
    keep_written_buffers(graph, written)
    anywhere = repeatable(graph, written)
    follow_readers(graph, anywhere)
    if begins is not None:
        stages_from(graph, begins, anywhere)
        return schedule, begins
    copies = [len(schedule.holders(stage)) for stage in range(schedule.num_stages)]
    return schedule, place_in_stages(graph, plan, copies, anywhere, captured.outputs, cluster, settled)


def _written(captured: Captured) -> set[str]:
    """The buffers that the step changes."""
    return {output.name for output in captured.outputs if output.kind == "buffer"}


def keep_written_buffers(graph: Graph, written: Collection[str]) -> None:
    """Let backward read a copy of each written buffer, made when forward reads the buffer first. Changes `graph`.

    Forward of this microbatch and of later ones changes the buffer before this backward runs. Backward also gets its
    own copies of views of the buffer, because a view that forward passes on shares the buffer's memory.
    """
    for node in placeholders(graph):
        if info_of(node).kind != "buffer" or info_of(node).name not in written or not is_tensor(node):
            continue
        view_anew(graph, _views_of(graph, node), is_backward)
        users = [u for u in node.users if u.op == "call_function"]
        if not any(is_backward(u) for u in users):
            continue
        first = next(u for u in graph.nodes if u in node.users)
        with graph.inserting_before(first):
            copy = graph.call_function(aten.clone.default, (node,))
        describe(copy, info_of(first)._replace(phase="forward", owner={}), node.meta["val"])
        for user in users:
            if is_backward(user):
                user.replace_input_with(node, copy)


def _views_of(graph: Graph, source: Node) -> list[Node]:
    """The views of a value in forward, in the order of the graph; views of views too."""
    found = {source: None}
    for node in graph.nodes:
        if node.op != "call_function" or is_backward(node) or not may_alias(node):
            continue
        if not found.keys().isdisjoint(node.all_input_nodes):
            found[node] = None
    return [*found][1:]


def split_in_cells(
    graph: Graph, captured: Captured, plan: Plan, settled: Mapping[str, tuple[int, ...]] | None = None
) -> Pipeline:
    """Split the local graph of a step, whose calls have a stage, into cells. Changes `graph`.

    Args:
        settled: the stages of parameters, as an earlier batch decided them.

    Raises:
        PlanError: the schedule does not allow a buffer or a shared parameter that the step has.
    """
    schedule = schedule_of(plan, train=any(output.kind == "gradient" for output in captured.outputs))
    num_stages, written = schedule.num_stages, _written(captured)
    copies = [len(schedule.holders(stage)) for stage in range(num_stages)]
    keep_written_buffers(graph, written)  # recomputation may have let backward read more of them
    anywhere = repeatable(graph, written)
    weights = any(action.kind == WEIGHT for _, action in schedule.cells())
    cells = split_cells(graph, captured.outputs, num_stages, anywhere, weights)
    _refuse_copied_buffers(cells, copies)
    _refuse_another_order(schedule, cells)
    if schedule.num_micro > 1:
        _refuse_changed_late(cells)
    if schedule.asynchronous:
        _refuse_shared(schedule, cells, copies)
    edges = cells.edges()
    check_schedule(schedule, edges)
    shared = [on for on in cells.parameters.values() if len(on) > 1]
    schedule = add_updates(add_transfers(schedule, edges), edges, shared)
    check_schedule(schedule, edges)
    stages = {i.name: cells.parameters.get(i.name, (0,)) for i in captured.inputs if i.kind == "parameter"}
    if settled is not None:
        stages = dict(settled)
    return Pipeline(cells, schedule, stages)


def updates_within(plan: Plan) -> bool:
    """Whether the plan's schedule updates parameters within a step."""
    return len(plan.copies) > 1 and schedule_of(plan).asynchronous


def num_stages(plan: Plan) -> int:
    """The number of stages of the plan's schedule; 1 without a pipeline."""
    return schedule_of(plan).num_stages if len(plan.copies) > 1 else 1


def _refuse_shared(schedule: Schedule, cells: StageGraphs, copies: Sequence[int]) -> None:
    """Raise PlanError if ranks that update at different times share a stage or a parameter."""
    if max(copies) > 1:
        what = (
            f"schedule={schedule.name} updates ranks at different times, so copies of a stage on several ranks differ"
        )
        raise PlanError(Refusal(what, "", "give each stage one rank"))
    for name, on in cells.parameters.items():
        if len({schedule.where(stage)[0] for stage in on}) > 1:
            sharing = f"stages {', '.join(map(str, on))} share the parameter {name}"
            what = f"schedule={schedule.name} updates ranks at different times, but {sharing}"
            instead = "untie it, let cut= put what reads it on one stage, or take schedule=1f1b"
            raise PlanError(Refusal(what, "", instead))


def _refuse_copied_buffers(cells: StageGraphs, copies: Sequence[int]) -> None:
    """Raise PlanError if a stage on several ranks changes a buffer: each rank sees some of the microbatches only."""
    for (_, stage), each in cells.graphs.items():
        name = next((output.name for output in each.outputs if output.kind == "buffer"), None)
        if name is not None and copies[stage] > 1:
            what = f"stage {stage} is on {copies[stage]} ranks that share its microbatches, but each microbatch changes"
            what += f" its buffer {name}"
            instead = "give that stage one rank, or let cut= put the module elsewhere"
            raise PlanError(Refusal(what, "", instead))


def _refuse_another_order(schedule: Schedule, cells: StageGraphs) -> None:
    """Raise PlanError if a schedule runs microbatches out of order on a stage that changes a buffer."""
    for (kind, stage), each in cells.graphs.items():
        name = next((output.name for output in each.outputs if output.kind == "buffer"), None)
        for rank, chunk in schedule.holders(stage) if name is not None else ():
            micros = [a.micro for a in schedule.ranks[rank] if a.kind == kind and a.chunk == chunk]
            if micros != sorted(micros):  # type: ignore[type-var]
                order = ", ".join(f"{kind}{micro}" for micro in micros)
                what = f"the schedule {schedule.name} has stage {stage} take microbatches as {order}"
                instead = "let that stage take them in order, or move the module to another stage with cut="
                raise PlanError(Refusal(f"{what}, and each of them changes its buffer {name}", "", instead))


def _refuse_changed_late(cells: StageGraphs) -> None:
    """Raise PlanError if backward changes a buffer that the forward of the next microbatch reads before."""
    for cell, each in cells.graphs.items():
        for name in (o.name for o in each.outputs if o.kind == "buffer" and cell[0] != FORWARD):
            for other, found in cells.graphs.items():
                infos = [info_of(node) for node in placeholders(found.graph) if node.users]
                if other != cell and any(info.kind == "buffer" and info.name == name for info in infos):
                    raise PlanError(
                        Refusal(
                            f"the backward pass changes the buffer {name}, as activation checkpointing does when it"
                            " runs forward again, but with pipeline= the forward of the next microbatch runs before",
                            "", "use recompute=layer in place of checkpointing, or leave micro= out",
                        )
                    )  # fmt: skip
