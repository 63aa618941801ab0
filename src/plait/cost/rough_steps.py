"""Closed forms of all plans of an outline, by which a search prunes: from those of its microbatches and its states."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Protocol

from plait.cost.parallel_forms import schedule_activations
from plait.cost.plan_evaluator import Relief, RoughStep
from plait.cost.transformer_simulation import misses_by
from plait.cost.transformer_step import CellTimes, StateTimes, exchange_per_step
from plait.plan.parallelism import Homes, Parallelism
from plait.plan.plan_space import PlanChoice, PlanSpace, StateOption
from plait.plan.sharding_plan import DEVICE, ZERO_STAGES
from plait.spec.cluster import Cluster

_SHARE_OF_EXCHANGES = 0.05  # of a step, that replicas which agree later may spend: they agree as often as that allows


class StepForms(Protocol):
    """What is known of a model in closed form."""

    @property
    def cluster(self) -> Cluster: ...
    def cells(self, outline: Parallelism, rows: int) -> CellTimes:
        """What a microbatch takes on the rank that computes longest."""
        ...

    def kept(self, outline: Parallelism, rows: int) -> tuple[float, float]:
        """Bytes that a microbatch keeps on its ranks for backward: of all layers, and of one."""
        ...

    def relief(self, outline: Parallelism, rows: int) -> Relief:
        """What a budget of recomputation saves; () if the outline gets none."""
        ...

    def states(self, how: Parallelism, rows: int, cells: CellTimes) -> StateTimes:
        """What sums of gradients, the update, copies and exchanges take."""
        ...

    def least_memory(self, how: Parallelism, rows: int) -> tuple[dict[str, float], dict[str, float]]:
        """Bytes by class on the device and outside it, without the activations of microbatches in flight."""
        ...


def rough_steps(
    forms: StepForms,
    space: PlanSpace,
    outline: Parallelism,
    rows: int,
    homes: Sequence[Homes],
    memory: float,
    most: float,
) -> Iterator[RoughStep]:
    """Closed forms of all plans of an outline with these homes, except plans that take more than `most` seconds."""
    cells, relief = forms.cells(outline, rows), forms.relief(outline, rows) if space.allows_budget(outline) else ()
    saves = outline.num_micro * relief[-1][1] if relief else 0.0
    kept, layer = forms.kept(outline, rows)
    orders = []
    for name, chunks in space.schedules(outline):
        order = outline.having(schedule=name, chunks=chunks)
        factor = schedule_activations(order.order, order.pipeline, order.num_micro, chunks)
        orders.append((name, chunks, cells.wait(order) + outline.num_micro * (chunks - 1) * cells.messages, factor))
    for option in space.states(outline):
        for home in homes:
            how = outline.having(cuts=option.cuts, sharded=option.sharded, later=option.later, homes=home)
            states = forms.states(how, rows, cells)
            rest = outline.num_micro * cells.seconds + states.data + states.update + states.copies
            if rest - saves > most:
                continue
            parts, away = forms.least_memory(how, rows)
            least = sum(parts.values())
            for name, chunks, wait, factor in orders:
                in_flight = kept * factor
                device, host = least + in_flight, away
                if home.activations != DEVICE:
                    device -= max(in_flight - 2 * layer, 0.0)
                    host = away | {"activations": in_flight}
                seconds, chosen = rest + wait, option
                if relief and home.activations == DEVICE and device < memory:
                    more, saved = _relieved(relief, (memory - device) / factor)
                    device, seconds = device + more * factor, seconds - outline.num_micro * saved
                if option.later is not None:
                    steps = _steps_between(space, states.exchange, seconds)
                    chosen = StateOption(option.cuts, option.sharded, option.later._replace(steps=steps))
                    seconds += exchange_per_step(how.having(later=chosen.later), states.exchange, seconds)
                missing = misses_by(device - memory, host, forms.cluster, how.num_ranks, home)
                yield RoughStep(PlanChoice(outline, chosen, home, name, chunks), seconds, device, missing)


def least_on_device(
    forms: StepForms, space: PlanSpace, outline: Parallelism, rows: int, homes: Sequence[Homes]
) -> float:
    """A lower bound of the bytes on the device of every plan of an outline with these homes.

    For each class of memory it counts the least that any of the plans takes: with the most ranks for ZeRO, and with the
    fewest microbatches in flight."""
    stages = [stage for stage in ZERO_STAGES if space.limits.allow("zero", stage)] or [0]
    ranks = outline.batch * outline.context
    if ranks == 1:
        stages = [0]
    ends = [(ZERO_STAGES[stage], ranks if stage else 1) for stage in dict.fromkeys((stages[0], stages[-1]))]
    num_away = [sum(kind != DEVICE for kind in home) for home in homes]
    places = dict.fromkeys((num_away.index(min(num_away)), num_away.index(max(num_away))))
    classes: dict[str, float] = {}
    for cuts, sharded in ends:
        for place in places:
            how = outline.having(cuts=cuts, sharded=sharded, homes=homes[place])
            parts, _ = forms.least_memory(how, rows)
            parts["parameters"] = parts.get("parameters", 0.0) + parts.pop("buffers", 0.0)  # of those that are fetched
            for kind in classes or parts:
                classes[kind] = min(classes.get(kind, math.inf), parts.get(kind, 0.0))
    kept, layer = forms.kept(outline, rows)
    orders = [outline.having(schedule=name, chunks=chunks) for name, chunks in space.schedules(outline)]
    if not orders:
        return math.inf
    factor = min(schedule_activations(each.order, each.pipeline, each.num_micro, each.chunks) for each in orders)
    in_flight = kept * factor
    if any(home.activations != DEVICE for home in homes):
        in_flight = min(in_flight, 2 * layer)
    return sum(classes.values()) + in_flight


def _relieved(relief: Relief, room: float) -> tuple[float, float]:
    """The bytes of `room` that a microbatch keeps instead of recomputing them, and the seconds that this saves."""
    for (less, longer), (more, shorter) in pairwise(((0.0, 0.0), *relief)):
        if room < more:
            return room, longer + (shorter - longer) * (room - less) / (more - less)
    return relief[-1]


def _steps_between(space: PlanSpace, exchange: float, seconds: float) -> int:
    """The fewest steps between two exchanges that take a small part of the time; the most if none do."""
    few = [steps for steps in space.sync_steps if exchange <= _SHARE_OF_EXCHANGES * steps * seconds]
    return few[0] if few else space.sync_steps[-1]
