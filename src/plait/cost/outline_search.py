"""The first part of a search for plans: closed forms of all plans that are legal, of which the best are kept.

An outline is a set of plans that differ in what their microbatches and their states are; it is pruned by closed forms
of these.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Protocol

from plait.cost.found_plans import Goal
from plait.cost.pipeline_forms import schedule_activations
from plait.cost.plan_evaluator import PlanEvaluator, Relief, RoughStep
from plait.cost.transformer_simulation import misses_by
from plait.cost.transformer_step import CellTimes, StateTimes, exchange_per_step
from plait.errors import PlanError, Refusal
from plait.plan.parallelism import Homes, Parallelism
from plait.plan.plan_space import Limits, PlanChoice, PlanSpace, StateOption
from plait.plan.sharding_plan import DEVICE, ZERO_STAGES
from plait.plan.well_known_plans import names_of
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


_OF_ONE_MESH = 4  # candidates of one spread of ranks that are simulated at most
_MOST_DEVICES = 1 << 17
_MOST_SIZES = 64  # of clusters that are looked at from below
_HOPELESS = 3.0  # times the best: such outlines are not looked into
_BINS = 8  # of memory, for a factor of 2: of each the fastest plan is kept

# (lower bound of the time, index of the space, rows, outline), the fastest first
_Outlines = list[tuple[float, int, int, Parallelism]]
SearchProgress = Callable[[str, int, int], None]  # (what is done, how many are done, of how many)

# What is looked through one after the other: values off the device cost time, and are worth it only where more fits.
_PASSES: tuple[tuple[str, Callable[[Homes], bool]], ...] = (
    ("closed forms", lambda home: not home.any_away),
    ("closed forms, values on the host", lambda home: home.any_away and not home.any_on_disk),
    ("closed forms, values on disk", lambda home: home.any_on_disk),
)


class KeptSteps:
    """The best steps, by their closed forms, that a search has seen so far."""

    def __init__(self, domains: tuple[int, ...], goal: Goal) -> None:
        self.num = 0
        self.best = math.inf  # seconds per row of the fastest plan that fits, by its worth
        self.goal = goal
        self.of_batches: dict[int, tuple[float, RoughStep]] = {}  # the best that fits, by rows of the batch
        self.named: dict[str, tuple[tuple[bool, float], int, RoughStep]] = {}
        self.nearest: tuple[float, float, int, RoughStep] | None = None
        self._domains = domains
        self._meshes: dict[tuple[object, ...], list[tuple[float, int, int, RoughStep]]] = {}
        self._bins: dict[int, tuple[float, int, RoughStep]] = {}
        self._names: dict[tuple[object, ...], list[str]] = {}

    def offer(self, rows: int, step: RoughStep) -> None:
        """Keep the step if it is among the best of its kind."""
        self.num += 1
        outline, later = step.choice.outline, step.choice.states.later
        score, fits = step.seconds / rows / self.goal.worth(rows, later is not None), step.missing <= 0
        key = (not fits, score if fits else step.missing)
        for name in self._names_of(step.choice):
            if name not in self.named or key < self.named[name][0]:
                self.named[name] = key, rows, step
        if not fits:
            if self.nearest is None or (step.missing, score) < self.nearest[:2]:
                self.nearest = step.missing, score, rows, step
            return
        self.best = min(self.best, score)
        if rows not in self.of_batches or score < self.of_batches[rows][0]:
            self.of_batches[rows] = score, step
        place = int(_BINS * math.log2(max(step.memory, 1.0)))
        if place not in self._bins or score < self._bins[place][0]:
            self._bins[place] = score, rows, step
        ranks = outline.batch, outline.weights, outline.context, outline.pipeline, outline.experts
        mesh = (rows, *ranks, later is None)
        heap = self._meshes.setdefault(mesh, [])
        item = (-score, -self.num, rows, step)
        if len(heap) < _OF_ONE_MESH:
            heapq.heappush(heap, item)
        elif item[0] > heap[0][0]:
            heapq.heapreplace(heap, item)

    def best_of(self, rows: int) -> float:
        """The best seconds per row so far, divided by the worth of the rows, which a plan must come near.

        If plans are ranked by the time to a loss, it is the best with that batch, because all batches are compared."""
        if not self.goal.to_loss:
            return self.best
        return self.of_batches[rows][0] if rows in self.of_batches else math.inf

    def _names_of(self, choice: PlanChoice) -> list[str]:
        """The strategies of a choice, which depend on neither microbatches, recomputation nor precision."""
        outline, states, homes, schedule, _ = choice
        ranks = outline.batch, outline.weights, outline.context, outline.pipeline
        key = ranks, states, homes, schedule
        if key not in self._names:
            self._names[key] = names_of(choice.how, self._domains)
        return self._names[key]

    def fastest(self) -> list[tuple[int, RoughStep]]:
        """The fastest steps, of every mesh a few, best first."""
        found = sorted((item for heap in self._meshes.values() for item in heap), key=lambda item: (-item[0], -item[1]))
        return [(rows, step) for _, _, rows, step in found]

    def front(self) -> list[tuple[int, RoughStep]]:
        """Steps of which none that was kept is both faster and smaller."""
        found, least = [], math.inf
        for score, rows, step in sorted(self._bins.values(), key=lambda item: (item[0], item[2].memory)):
            if step.memory < least and score <= _HOPELESS * self.best:
                found.append((rows, step))
                least = step.memory
        return found


def explore(
    evaluator: PlanEvaluator,
    cluster: Cluster,
    rows: tuple[int, ...],
    limits: Limits,
    memory: float,
    tell: SearchProgress,
    smaller: bool,
    goal: Goal,
) -> KeptSteps:
    """The closed forms of all plans: on all devices, on those of a domain of links, on a power of two, and on one."""
    kept = KeptSteps(cluster.sizes, goal)
    counts = {cluster.num_devices}
    if smaller:
        counts |= {1, 1 << cluster.num_devices.bit_length() - 1, *cluster.sizes}
    _look(evaluator, [evaluator.space(count, rows, limits) for count in sorted(counts)], kept, memory, tell)
    if not kept.num:
        raise PlanError(
            Refusal(f"no plan of {cluster.num_devices} ranks on {cluster.name} is legal for a batch of"
                    f" {' or '.join(map(str, rows))} rows",
                    f"ranks divide the rows, or {evaluator.divides}" + (f", within {limits}" if limits.values else ""),
                    "give another batch, another number of devices, or wider limits")
        )  # fmt: skip
    return kept


def _look(
    evaluator: PlanEvaluator, spaces: Sequence[PlanSpace], kept: KeptSteps, memory: float, tell: SearchProgress
) -> None:
    """Offer the plans of the spaces, by a lower bound of their time: first with all on the device, then what homes
    could make faster. What takes more memory at least is looked at last: if other plans fit, for the strategies that it
    is, and if none does, for the plan that comes nearest."""
    worth = {rows: kept.goal.worth(rows, False) for space in spaces for rows in space.rows}

    of_micro: dict[tuple[Parallelism, int], float] = {}  # what a microbatch takes depends on its own rows alone

    def floor_of(space: PlanSpace, outline: Parallelism, rows: int) -> float:
        key = outline.having(num_micro=1), rows // outline.num_micro
        if key not in of_micro:
            relief = evaluator.relief(*key) if space.allows_budget(outline) else ()
            of_micro[key] = evaluator.cells(*key).seconds - (relief[-1][1] if relief else 0.0)
        return outline.num_micro * of_micro[key] / rows / worth[rows]

    outlines = [
        (floor_of(space, outline, rows), index, rows, outline)
        for index, space in enumerate(spaces)
        for rows, outline in space.outlines()
    ]
    outlines.sort(key=lambda each: each[0])
    full: list[tuple[str, _Outlines, list[tuple[Homes, ...]]]] = []  # of each pass, what has no room

    def scan(what: str, chosen: _Outlines, homes: Sequence[tuple[Homes, ...]], look_at_all: bool) -> _Outlines:
        """Offer the plans of outlines with these homes; returns the outlines that have no room."""
        away, too_large = what != _PASSES[0][0], []
        for number, each in enumerate(chosen):
            if number % 64 == 0:
                tell(what, number, len(chosen))
            floor, index, rows, outline = each
            most = kept.best_of(rows) * (1.0 if away else _HOPELESS)
            if floor > most and kept.goal.to_loss:
                continue  # another batch may have further to go
            if floor > most:
                break
            space = spaces[index]
            if not homes[index]:
                continue
            if not look_at_all and evaluator.least(space, outline, rows, homes[index]) > memory:
                too_large.append(each)
                continue
            for step in evaluator.rough(space, outline, rows, homes[index], memory, most * rows * worth[rows]):
                kept.offer(rows, step)
        tell(what, len(chosen), len(chosen))
        return too_large

    for what, takes in _PASSES:
        homes = [tuple(home for home in space.homes if takes(home)) for space in spaces]
        if any(homes) and not (what == _PASSES[-1][0] and kept.best < math.inf):
            full.append((what, scan(what, outlines, homes, False), homes))
    if kept.best == math.inf:
        return _find_nearest(evaluator, spaces, outlines, kept, memory, tell)
    _, best_rows = min((score, each) for each, (score, _) in kept.of_batches.items())
    for what, too_large, homes in full:  # for why strategies lost against the best plan, with its batch
        scan(what, [each for each in too_large if each[2] == best_rows], homes, True)


def _find_nearest(
    evaluator: PlanEvaluator,
    spaces: Sequence[PlanSpace],
    outlines: _Outlines,
    kept: KeptSteps,
    memory: float,
    tell: SearchProgress,
) -> None:
    """Offer the plans that may come nearest to what a rank may take: by a lower bound of their memory, until that is
    above what a plan takes."""
    what = "the nearest plan"
    bounds = [
        evaluator.least(spaces[index], outline, rows, spaces[index].homes) for _, index, rows, outline in outlines
    ]
    for number, place in enumerate(sorted(range(len(outlines)), key=bounds.__getitem__)):
        if kept.nearest is not None and bounds[place] - memory > kept.nearest[0]:
            break
        tell(what, number, len(outlines))
        _, index, rows, outline = outlines[place]
        for step in evaluator.rough(spaces[index], outline, rows, spaces[index].homes, memory, math.inf):
            kept.offer(rows, step)
    tell(what, len(outlines), len(outlines))


def devices_enough(
    evaluator: PlanEvaluator, cluster: Cluster, rows: tuple[int, ...], limits: Limits, memory: float
) -> int:
    """The smallest number of devices, in whole domains of links, on which a plan fits; 0 if none was found.

    More devices are not always enough where fewer are: 15 nodes have fewer divisors than 14. So sizes are looked at
    from below, all of them up to so many nodes, and beyond that as many evenly spaced ones.
    """

    def fits(count: int) -> bool:
        larger = evaluator.on(cluster.with_devices(count))
        space = larger.space(count, rows, limits)
        smallest = [
            (larger.least(space, outline, num, space.homes), num, outline)
            for num, outline in space.outlines()
            if num == outline.batch * outline.num_micro
        ]
        return any(
            step.missing <= 0
            for least, num, outline in sorted(smallest, key=lambda each: each[0])
            if least <= memory
            for step in larger.rough(space, outline, num, space.homes, memory, math.inf)
        )

    if cluster.links[-1].size and cluster.links[-1].size <= cluster.num_devices:
        return 0  # there is no link for more
    node = next((link.size for link in reversed(cluster.links[:-1]) if link.size), 1)
    low, first = 0, -(-(cluster.num_devices + 1) // node)
    high = first
    while high * node <= _MOST_DEVICES and not fits(high * node):
        low, high = high, 2 * high
    if high * node > _MOST_DEVICES:
        return 0
    while high - low > _MOST_SIZES:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle * node) else (middle, high)
    between = range(first, high, max((high - first) // _MOST_SIZES, 1))
    return next((count for count in between if fits(count * node)), high) * node
