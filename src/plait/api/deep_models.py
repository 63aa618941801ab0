"""Makes the program of a deep model from programs of shallow ones, so that equal layers are not lowered one by one.

A model whose layers are equal is lowered with few of them: the first, a middle and the last stage of a pipeline, once
with one layer each and once with two. The calls that the second layer adds to each graph are repeated
(cost/repeated_layers.py), and the middle stage is used for all stages between the first and the last. Stages differ by
at most one layer.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import nn

from plait.compile.stages.split import schedule_of
from plait.cost.repeated_layers import with_layers
from plait.cost.step_program import OpCall, PipelineCalls, ProgramCall, StepProgram, moved_by
from plait.plan.plan import Plan
from plait.schedule.readiness import Cell, RankAction, chain
from plait.schedule.transfers import add_transfers, add_updates
from plait.spec.schedule import BACKWARD, FORWARD, SEND, WEIGHT, Schedule

DEEP = 16  # layers; a model with fewer is lowered as it is
Describe = Callable[[int, Plan], StepProgram]  # of the model with so many of its equal layers, under a plan


@dataclass(frozen=True)
class Layers:
    """The list of a model's equal layers: its path, and how many they are."""

    path: str
    number: int


def equal_layers(model: nn.Module) -> Layers | None:
    """The longest list of layers of one kind, with parameters of equal shapes; None if no list has two of them."""
    found = []
    for path, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) > 1:
            kinds = {
                None if each is None else _form(each) for each in module
            }  # a list may have places without a module
            if len(kinds) == 1 and None not in kinds:
                found.append(Layers(path, len(module)))
    return max(found, key=lambda each: each.number, default=None)


def _form(module: nn.Module) -> tuple[object, ...]:
    parts = tuple((path, type(each)) for path, each in module.named_modules())
    return parts, tuple((name, tuple(p.shape), p.dtype, p.requires_grad) for name, p in module.named_parameters())


def with_fewer(model: nn.Module, layers: Layers, number: int) -> nn.Module:
    """A model that shares the modules of `model`, and has the first `number` of its equal layers."""
    made = copy.copy(model)
    made._modules = dict(model._modules)
    parent = made
    *parts, last = layers.path.split(".")
    for part in parts:
        child = copy.copy(parent._modules[part])
        assert child is not None
        child._modules = dict(child._modules)
        parent._modules[part] = child
        parent = child
    whole = parent._modules[last]
    assert isinstance(whole, nn.ModuleList)
    parent._modules[last] = nn.ModuleList(list(whole)[:number])
    return made


def deep_program(layers: Layers, plan: Plan, describe: Describe) -> StepProgram | None:
    """The program of a plan for a deep model; `describe` makes the programs of shallow ones.

    None where a few layers do not determine the program: for stages that the user cuts or spreads, replicated stages,
    budgets of recomputation, values that skip stages, and gradients whose buckets depend on their number.
    """
    regular = not plan.stages and not plan.cut and max(plan.copies) == 1 and plan.recompute.kind in ("none", "layer")
    if not regular:
        return None
    ranks = len(plan.copies)
    if ranks == 1:
        fewer, more = (describe(number, plan) for number in (2, 3))
        return _without_pipeline(fewer, more, layers.number - 2)
    schedule = schedule_of(plan)
    if schedule.asynchronous or schedule.num_stages > layers.number:
        return None
    kept = min(schedule.num_stages, 3)
    splits = any(action.kind == WEIGHT for actions in schedule.ranks for action in actions)
    shallow = replace(plan, pipeline=kept, chunks=1, schedule="zb-h1" if splits else "1f1b")
    bases = []
    for each in (1, 2):
        cut = tuple(f"{layers.path}.{each * stage}" for stage in range(1, kept))
        bases.append(describe(each * kept, replace(shallow, cut=cut)))
    return _with_pipeline(bases[0], bases[1], plan, schedule, layers.number)


def _without_pipeline(fewer: StepProgram, more: StepProgram, times: int) -> StepProgram | None:
    graphs = {name: with_layers(calls, more.graphs.get(name, ()), times) for name, calls in fewer.graphs.items()}
    update = _update(fewer.updates[0], more.updates[0], times)
    if update is None or any(calls is None for calls in graphs.values()):
        return None
    flops = fewer.model_flops + times * (more.model_flops - fewer.model_flops)
    found = {name: calls for name, calls in graphs.items() if calls is not None}
    return replace(fewer, graphs=found, updates=(update,), model_flops=flops)


def _update(fewer: Sequence[ProgramCall], more: Sequence[ProgramCall], times: int) -> tuple[ProgramCall, ...] | None:
    """The calls of an update: one updates all parameters, and gathers follow."""
    one, two = ([call for call in calls if isinstance(call, OpCall)] for calls in (fewer, more))
    rest = with_layers(moved_by(fewer[len(one) :], -len(one)), moved_by(more[len(two) :], -len(two)), times)
    if rest is None or len(one) != len(two):
        return None
    moved = []
    for each, other in zip(one, two, strict=True):
        num_bytes = each.num_bytes + times * (other.num_bytes - each.num_bytes)
        number = each.parameters + times * (other.parameters - each.parameters)
        title = f"{each.signature} and {times} layers"
        moved.append(replace(each, signature=title, num_bytes=num_bytes, parameters=number))
    return (*moved, *moved_by(rest, len(moved)))


def _with_pipeline(
    fewer: StepProgram, more: StepProgram, plan: Plan, schedule: Schedule, number: int
) -> StepProgram | None:
    one, two = fewer.pipeline, more.pipeline
    assert one is not None and two is not None
    kept, num_stages = len(fewer.updates), schedule.num_stages
    if {edge for edge in one.edges if edge[0][1] != edge[1][1]} != chain(kept):
        return None
    edges = chain(num_stages)
    schedule = add_updates(add_transfers(schedule, edges), edges)

    # The first and the last stage, and one between that stands for all others, with as many layers as each has.
    likes = [0, *([1] * (num_stages - 2)), kept - 1]
    counts = layers_of_stages(number, num_stages)
    graphs: dict[str, tuple[ProgramCall, ...]] = {}
    micro_graphs: dict[tuple[int, Cell], tuple[str, ...]] = {}
    messages: dict[RankAction, int] = {}
    updates = []
    sizes = {(stage, action.of): num for (stage, action), num in one.messages.items()}  # a rank has one stage there
    for rank, stages in enumerate(schedule.stages):
        for stage, kind in itertools.product(stages, (FORWARD, BACKWARD, WEIGHT)):
            names = one.micro_graphs.get((likes[stage], (kind, likes[stage])))
            if names is not None:
                deeper = {name: f"{name} of {counts[stage]} layers" for name in names}
                micro_graphs[rank, (kind, stage)] = tuple(deeper[name] for name in names)
                if not _add_graphs(graphs, deeper, fewer, more, counts[stage] - 1):
                    return None
        for action in schedule.ranks[rank]:
            if action.kind == SEND:
                messages[rank, action] = sizes.get((likes[stages[action.chunk]], action.of), 0)
        update: list[ProgramCall] = []
        for stage in stages:
            part = _update(fewer.updates[likes[stage]], more.updates[likes[stage]], counts[stage] - 1)
            if part is None:
                return None
            update += moved_by(part, len(update))
        updates.append(tuple(update))
    exchanged = [0] * schedule.num_ranks
    for stage in {0, num_stages - 1}:
        exchanged[schedule.where(stage)[0]] += one.exchanged[likes[stage]] if one.exchanged else 0
    piped = PipelineCalls(one.axis, schedule, edges, micro_graphs, messages, tuple(exchanged), one.after)
    each = (more.model_flops - fewer.model_flops) / kept
    flops = fewer.model_flops + (number - kept) * each
    return replace(fewer, mesh=plan.mesh, graphs=graphs, updates=tuple(updates), pipeline=piped, model_flops=flops)


def _add_graphs(
    graphs: dict[str, tuple[ProgramCall, ...]],
    deeper: Mapping[str, str],
    fewer: StepProgram,
    more: StepProgram,
    times: int,
) -> bool:
    """Add graphs with `times` more layers to `graphs`, as `deeper` names them. Returns False where there are none."""
    for name, own in deeper.items():
        calls = graphs.get(own) or with_layers(fewer.graphs[name], more.graphs[name], times)
        if calls is None:
            return False
        graphs[own] = calls
    return True


def layers_of_stages(number: int, num_stages: int) -> list[int]:
    """The layers of each stage: as even as can be, and the stages in the middle have what is left over, because the
    first keeps most microbatches and the last has the output layer."""
    least, more = divmod(number, num_stages)
    begin = max((num_stages - more) // 2, 0)
    return [least + (begin <= stage < begin + more) for stage in range(num_stages)]
