"""From the local graph of a whole step to the cells of a pipeline, and where parameters lie then."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from torch.fx import Graph

from plait.compile.capture.capture import Captured
from plait.compile.ir.calls import placeholders
from plait.compile.ir.node_info import info_of
from plait.compile.stages.assign import complete_places, follow_readers, place_in_stages, repeatable, stages_from
from plait.compile.stages.shared import keep_written_buffers
from plait.compile.stages.stage_graphs import StageGraphs, split_cells
from plait.errors import PlanError, Refusal
from plait.plan.axes import stage_axis
from plait.plan.kinds import Places, ScheduleName
from plait.plan.plan import Plan
from plait.schedule.check import check_schedule
from plait.schedule.families import make_replicated, make_schedule
from plait.schedule.readiness import Cell
from plait.schedule.transfers import add_transfers, add_updates
from plait.spec.action import FORWARD, WEIGHT, Action
from plait.spec.layout import Layout, Only, Placement
from plait.spec.schedule import Schedule


@dataclass(frozen=True)
class Pipeline:
    """A step in cells, and the order in which ranks along the axis `pipeline` run them."""

    cells: StageGraphs
    schedule: Schedule
    stages: Mapping[str, tuple[int, ...]]  # of every parameter

    @cached_property
    def groups(self) -> Mapping[int, tuple[int, int]]:
        """Schedule.groups of an asynchronous schedule."""
        return self.schedule.groups()

    @cached_property
    def added_up(self) -> frozenset[str]:
        """Parameters of whose gradients several cells, or several ranks, make a term."""
        return self.cells.added_up | {name for name in self.stages if len(self.ranks_of(name)) > 1}

    def num_micro(self, cell: Cell) -> frozenset[int]:
        """On how many microbatches the ranks that have a cell run it."""
        if self.schedule.asynchronous:
            return frozenset(num for _, num in self.groups.values())
        return frozenset(self.schedule.num_micro_of(rank, chunk) for rank, chunk in self.schedule.holders(cell[1]))

    def ranks_of(self, name: str) -> tuple[int, ...]:
        """The ranks along the axis that have a parameter."""
        found = {rank for stage in self.stages[name] for rank, _ in self.schedule.holders(stage)}
        return tuple(sorted(found))

    def placed(self, name: str, layout: Layout) -> Layout:
        """The layout of a parameter, with where it lies along the pipeline."""
        first, *others = self.ranks_of(name)
        if len(others) + 1 == self.schedule.num_ranks:
            return layout
        where: Placement = Only(first, tuple(others))
        return replace(layout, placements=((stage_axis(), where), *layout.placements))


def schedule_of(plan: Plan, train: bool = True) -> Schedule:
    """The schedule that a plan names, without transfers: of training, or of the forward passes alone.

    PlanError or ScheduleError for one that cannot be.
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
        return Schedule.parse(Path(path).read_text())
    except OSError as error:
        raise PlanError(f"schedule={path}: cannot read the file: {error.strerror}") from None


def _micro(action: Action) -> int:
    assert action.micro is not None
    return action.micro


def cut_in_stages(
    graph: Graph,
    captured: Captured,
    plan: Plan,
    settled: Mapping[str, tuple[int, ...]] | None = None,
    begins: list[float] | None = None,
) -> tuple[Schedule, list[float]]:
    """Give the calls of a step their stages. The schedule that these are for, and the places with which they begin.

    `settled` are the stages of parameters as an earlier batch decided them; `begins` are places that are known already.
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
    return schedule, place_in_stages(graph, plan, copies, anywhere, captured.outputs, settled)


def _written(captured: Captured) -> set[str]:
    """The buffers that the step changes."""
    return {output.name for output in captured.outputs if output.kind == "buffer"}


def split_in_cells(
    graph: Graph, captured: Captured, plan: Plan, settled: Mapping[str, tuple[int, ...]] | None = None
) -> Pipeline:
    """Split the local graph of a step, whose calls know their stages, into cells. Changes `graph`.

    `settled` are the stages of parameters as an earlier batch decided them. PlanError for a pipeline that cannot be.
    """
    schedule = schedule_of(plan, train=any(output.kind == "gradient" for output in captured.outputs))
    num_stages, written = schedule.num_stages, _written(captured)
    copies = [len(schedule.holders(stage)) for stage in range(num_stages)]
    keep_written_buffers(graph, written)  # of which backward may by now read some that forward alone did
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
    """Into how many stages the plan's schedule cuts the step; 1 without a pipeline."""
    return schedule_of(plan).num_stages if len(plan.copies) > 1 else 1


def _refuse_shared(schedule: Schedule, cells: StageGraphs, copies: Sequence[int]) -> None:
    """What an asynchronous schedule cannot share between ranks that update at different times."""
    if max(copies) > 1:
        what = f"schedule={schedule.name} with stages on several ranks would update their copies at different times"
        raise PlanError(Refusal(what, "", "give each stage one rank"))
    for name, on in cells.parameters.items():
        if len({schedule.where(stage)[0] for stage in on}) > 1:
            sharing = f"stages {', '.join(map(str, on))} share the parameter {name}"
            what = f"schedule={schedule.name} updates ranks at different times, but {sharing}"
            instead = "untie it, let cut= put what reads it on one stage, or take schedule=1f1b"
            raise PlanError(Refusal(what, "", instead))


def _refuse_copied_buffers(cells: StageGraphs, copies: Sequence[int]) -> None:
    """Running statistics follow every microbatch in turn, and each copy of a stage sees only some."""
    for (_, stage), each in cells.graphs.items():
        name = next((output.name for output in each.outputs if output.kind == "buffer"), None)
        if name is not None and copies[stage] > 1:
            turns = f"stage {stage} is on {copies[stage]} ranks that take turns"
            what = f"{turns}, but each microbatch changes its buffer {name}"
            instead = "give that stage one rank, or let cut= put the module elsewhere"
            raise PlanError(Refusal(what, "", instead))


def _refuse_another_order(schedule: Schedule, cells: StageGraphs) -> None:
    """Buffers follow the microbatches in their order, which a schedule of the user's own may change."""
    for (kind, stage), each in cells.graphs.items():
        name = next((output.name for output in each.outputs if output.kind == "buffer"), None)
        for rank, chunk in schedule.holders(stage) if name is not None else ():
            micros = [a.micro for a in schedule.ranks[rank] if a.kind == kind and a.chunk == chunk]
            if micros != sorted(micros):  # type: ignore[type-var]
                order = ", ".join(f"{kind}{micro}" for micro in micros)
                what = f"the schedule {schedule.name} has stage {stage} take microbatches as {order}"
                instead = "let that stage take them in order, or put the module elsewhere with cut="
                raise PlanError(Refusal(f"{what}, and each of them changes its buffer {name}", "", instead))


def _refuse_changed_late(cells: StageGraphs) -> None:
    """A buffer that backward changes, before the forward of the next microbatch reads it: there they overlap."""
    for cell, each in cells.graphs.items():
        for name in (o.name for o in each.outputs if o.kind == "buffer" and cell[0] != FORWARD):
            for other, found in cells.graphs.items():
                infos = [info_of(node) for node in placeholders(found.graph) if node.users]
                if other != cell and any(info.kind == "buffer" and info.name == name for info in infos):
                    raise PlanError(
                        Refusal(
                            f"the backward pass changes the buffer {name}, as activation checkpointing does that runs"
                            " the forward again, and with pipeline= the forward of the next microbatch comes before it",
                            "", "leave checkpointing to recompute=layer, or leave micro= out",
                        )
                    )  # fmt: skip
