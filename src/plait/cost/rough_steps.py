"""Closed forms of all plans of an outline, from those of its microbatches and of states: what a search prunes by."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Protocol

from plait.cost.parallel_forms import schedule_activations
from plait.cost.plan_search import RoughStep
from plait.cost.transformer_simulation import misses_by
from plait.cost.transformer_step import CellTimes, StateTimes, agreement
from plait.plan.parallelism import Homes, Parallelism
from plait.plan.plan_space import PlanChoice, PlanSpace, StateOption
from plait.plan.sharding_plan import DEVICE
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
    """Closed forms of all plans of an outline with these homes, but of those that take more than `most` seconds."""
    cells = forms.cells(outline, rows)
    kept, layer = forms.kept(outline, rows)
    orders = []
    for name, chunks in space.schedules(outline):
        order = replace(outline, schedule=name, chunks=chunks)
        factor = schedule_activations(order.order, order.pipeline, order.num_micro, chunks)
        orders.append((name, chunks, cells.wait(order) + outline.num_micro * (chunks - 1) * cells.messages, factor))
    for option in space.states(outline):
        for home in homes:
            how = replace(outline, cuts=option.cuts, sharded=option.sharded, later=option.later, homes=home)
            states = forms.states(how, rows, cells)
            rest = outline.num_micro * cells.seconds + states.data + states.update + states.copies
            if rest > most:
                continue
            least, away = forms.least_memory(how, rows)
            for name, chunks, wait, factor in orders:
                in_flight = kept * factor
                device, host = sum(least.values()) + in_flight, away
                if home.activations != DEVICE:
                    device -= max(in_flight - 2 * layer, 0.0)
                    host = away | {"activations": in_flight}
                seconds, chosen = rest + wait, option
                if option.later is not None:
                    steps = _steps_between(space, states.exchange, seconds)
                    chosen = StateOption(option.cuts, option.sharded, option.later._replace(steps=steps))
                    seconds += agreement(replace(how, later=chosen.later), states.exchange, seconds)
                missing = misses_by(device - memory, host, forms.cluster, how.num_ranks, home)
                yield RoughStep(PlanChoice(outline, chosen, home, name, chunks), seconds, device, missing)


def _steps_between(space: PlanSpace, exchange: float, seconds: float) -> int:
    """The fewest steps between two exchanges that take a small part of the time; the most if none do."""
    few = [steps for steps in space.sync_steps if exchange <= _SHARE_OF_EXCHANGES * steps * seconds]
    return few[0] if few else space.sync_steps[-1]
