"""Search for the plan of a step: closed forms for all that is legal, a simulation of the best few dozen.

    search(evaluator, cluster, rows, limits) -> FoundPlans

An evaluator knows a model. It says which plans are legal (a `PlanSpace`), what each roughly takes, and what one takes
as simulated. Nothing is random: the same input gives the same answer.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

from plait.cost.found_plans import (
    TOKENS,
    USABLE,
    Candidate,
    FoundPlans,
    Goal,
    LostChoice,
    PlannedStep,
    main_difference,
)
from plait.cost.memory_model import human_bytes
from plait.cost.transformer_step import CellTimes
from plait.errors import PlanError, Refusal
from plait.plan.legality import refusals
from plait.plan.parallelism import Homes, Parallelism
from plait.plan.plan import Plan
from plait.plan.plan_space import Limits, PlanChoice, PlanSpace, plan_of
from plait.plan.step_facts import StepFacts
from plait.plan.well_known_plans import names_of
from plait.spec.cluster import Cluster

_OF_ONE_MESH = 4  # candidates of one spread of ranks that are simulated at most
_SHOWN = 8
_MOST_DEVICES = 1 << 17
_HOPELESS = 3.0  # times the best: such outlines are not looked into
_BINS = 8  # of memory, for a factor of 2: of each the fastest plan is kept

# (lower bound of the time, index of the space, rows, outline), the fastest first
_Outlines = list[tuple[float, int, int, Parallelism]]
Progress = Callable[[str, int, int], None]  # (what is done, how many are done, of how many)
# What a microbatch saves that repeats less than whole layers: bytes that it keeps beside their inputs, and the seconds
# that it does not repeat; ascending.
Relief = tuple[tuple[float, float], ...]


class RoughStep(NamedTuple):
    """What closed forms say of a plan: its seconds, its bytes on the device, and those that it takes beyond what there
    is on the device or the host, which are at most 0 if it fits."""

    choice: PlanChoice
    seconds: float
    memory: float
    missing: float


class PlanEvaluator(Protocol):
    """A model, for a search."""

    def space(self, num_ranks: int, rows: tuple[int, ...], limits: Limits) -> PlanSpace:
        """The plans for so many ranks."""
        ...

    def cells(self, outline: Parallelism, rows: int) -> CellTimes:
        """What a microbatch takes on the rank that computes longest."""
        ...

    def relief(self, outline: Parallelism, rows: int) -> Relief:
        """What a budget of recomputation saves an outline that repeats whole layers; () if closed forms do not say."""
        ...

    def rough(
        self, space: PlanSpace, outline: Parallelism, rows: int, homes: Sequence[Homes], memory: float, most: float
    ) -> Iterator[RoughStep]:
        """Closed forms of all plans of an outline with these homes, but of those that take more than `most` seconds."""
        ...

    def least(self, space: PlanSpace, outline: Parallelism, rows: int, homes: Sequence[Homes]) -> float:
        """Bytes on the device that each plan of an outline with these homes takes at least."""
        ...

    def refine(self, how: Parallelism, rows: int, memory: float, limits: Limits) -> Parallelism:
        """The same plan with the best budget of recomputation and the best buckets."""
        ...

    def simulate(self, plan: Plan, rows: int) -> PlannedStep:
        """The step of a plan. Raises PlanError for a plan that cannot be had."""
        ...

    @property
    def most_simulated(self) -> int:
        """How many plans are worth a simulation."""
        ...

    def on(self, cluster: Cluster) -> PlanEvaluator:
        """The same model on another cluster."""
        ...

    @property
    def divides(self) -> str:
        """What ranks must divide, in words."""
        ...


class _Kept:
    """The best of what closed forms were computed of, while a search goes on."""

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
        """What a plan must come near to be worth a look, in seconds per row by its worth: the best so far. If plans are
        ranked by the time to a loss it is the best with that batch, since all batches are compared."""
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


def search(
    evaluator: PlanEvaluator,
    cluster: Cluster,
    rows: tuple[int, ...],
    limits: Limits,
    memory: float | None = None,
    progress: Progress | None = None,
    smaller: bool = True,
    goal: Goal = TOKENS,
) -> FoundPlans:
    """The best plans for a model on a cluster.

    Args:
        evaluator: the model.
        cluster: where to run; plans take all of its devices, or those of one domain of its links.
        rows: sizes of the global batch to choose from.
        limits: values that keys may have.
        memory: bytes that a rank may take; by default USABLE of those of the device.
        progress: is called with what is done, how much is done, and of how much.
        smaller: whether plans may leave devices idle.
        goal: what plans are ranked by.

    Raises PlanError if no plan is legal; a plan that is legal but does not fit is in `nearest`.
    """
    limit, tell = memory or USABLE * cluster.device.memory, progress or _say_nothing
    kept = _explore(evaluator, cluster, rows, limits, limit, tell, smaller, goal)
    judge = _Judge(evaluator, limits, limit, goal)
    num, front = evaluator.most_simulated, kept.front()
    front = front[:: -(-3 * len(front) // num)] if front else []  # a third as many of it, evenly
    of = num + len(front)
    for each, (_, step) in sorted(kept.of_batches.items()) if goal.to_loss else ():
        judge.judge(step.choice.how, each)
    for chosen, enough in ((kept.fastest(), num), (front, of)):
        for each, step in chosen:
            if judge.num < enough:  # a plan that is refused leaves its place to another
                tell("simulated", judge.num, of)
                judge.judge(step.choice.how, each)
    tell("simulated", of, of)
    ranked = judge.ranked()
    if not ranked:
        return _nothing_fits(evaluator, cluster, rows, limits, kept, judge)
    lost = [_lost(judge, name, each, step, ranked[0], cluster) for name, (_, each, step) in kept.named.items()]
    return FoundPlans(
        cluster, limit, _with_reasons(_one_a_mesh(ranked)), _with_reasons(_front(ranked)),
        tuple(sorted((each for each in lost if each is not None), key=lambda each: each.name)),
        None, 0, kept.num, judge.num, judge.refusals(), goal, _of_batches(ranked) if goal.to_loss else (),
    )  # fmt: skip


def _of_batches(ranked: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """The best candidate of each size of the batch, ascending."""
    found: dict[int, Candidate] = {}
    for each in ranked:
        found.setdefault(each.rows, each)
    return tuple(found[rows] for rows in sorted(found))


def _explore(
    evaluator: PlanEvaluator,
    cluster: Cluster,
    rows: tuple[int, ...],
    limits: Limits,
    memory: float,
    tell: Progress,
    smaller: bool,
    goal: Goal,
) -> _Kept:
    """The closed forms of all plans: on all devices, on those of a domain of links, on a power of two, and on one."""
    kept = _Kept(cluster.sizes, goal)
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


def _look(evaluator: PlanEvaluator, spaces: Sequence[PlanSpace], kept: _Kept, memory: float, tell: Progress) -> None:
    """Offer the plans of the spaces, by a lower bound of their time: first with all on the device, then what homes
    could make faster. What takes more memory at least is looked at last: if other plans fit, for the strategies that it
    is, and if none does, for the plan that comes nearest."""
    worth = {rows: kept.goal.worth(rows, False) for space in spaces for rows in space.rows}

    def floor_of(space: PlanSpace, outline: Parallelism, rows: int) -> float:
        relief = evaluator.relief(outline, rows) if space.allows_budget(outline) else ()
        saved = relief[-1][1] if relief else 0.0
        return outline.num_micro * (evaluator.cells(outline, rows).seconds - saved) / rows / worth[rows]

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
    for what, too_large, homes in full:
        scan(what, too_large, homes, True)


def _find_nearest(
    evaluator: PlanEvaluator,
    spaces: Sequence[PlanSpace],
    outlines: _Outlines,
    kept: _Kept,
    memory: float,
    tell: Progress,
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


# What is looked through one after the other: values off the device cost time, and are worth it only where more fits.
_PASSES: tuple[tuple[str, Callable[[Homes], bool]], ...] = (
    ("closed forms", lambda home: not home.any_away),
    ("closed forms, values on the host", lambda home: home.any_away and not home.any_on_disk),
    ("closed forms, values on disk", lambda home: home.any_on_disk),
)


def _nothing_fits(
    evaluator: PlanEvaluator, cluster: Cluster, rows: tuple[int, ...], limits: Limits, kept: _Kept, judge: _Judge
) -> FoundPlans:
    """The nearest plan, and the smallest number of devices on which one fits."""
    if kept.nearest is None:  # by closed forms plans fit, and none could be had
        why, count = judge.refusals()[0] if judge.refusals() else ("simulated, they take more memory", judge.num)
        raise PlanError(
            Refusal(f"none of {kept.num:,} plans for {cluster.name} that fit by closed forms can be had",
                    f"{why} (said of {count})", "give wider limits, or a cluster with more memory")
        )  # fmt: skip
    _, _, each, step = kept.nearest
    nearest = judge.judge(step.choice.how, each)
    enough = _enough(evaluator, cluster, rows, limits, judge.memory)
    return FoundPlans(
        cluster, judge.memory, (), (), (), nearest, enough, kept.num, judge.num, judge.refusals(), kept.goal
    )  # fmt: skip


def _enough(evaluator: PlanEvaluator, cluster: Cluster, rows: tuple[int, ...], limits: Limits, memory: float) -> int:
    """The smallest number of devices, in whole domains of links, on which a plan fits; 0 if none was found."""

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
    low, high = 0, -(-(cluster.num_devices + 1) // node)
    while high * node <= _MOST_DEVICES and not fits(high * node):
        low, high = high, 2 * high
    if high * node > _MOST_DEVICES:
        return 0
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle * node) else (middle, high)
    return high * node


class _Judge:
    """Simulates plans, each once, and counts those that are refused."""

    def __init__(self, evaluator: PlanEvaluator, limits: Limits, memory: float, goal: Goal) -> None:
        self._evaluator = evaluator
        self._goal = goal
        self._limits = limits
        self.memory = memory
        self._found: dict[tuple[str, int], Candidate | None] = {}
        self._refused: Counter[str] = Counter()

    @property
    def num(self) -> int:
        """Plans that were simulated."""
        return sum(each is not None for each in self._found.values())

    def refusals(self) -> tuple[tuple[str, int], ...]:
        return tuple(self._refused.most_common())

    def judge(self, how: Parallelism, rows: int) -> Candidate | None:
        """The candidate, with budget and buckets chosen; None if it is refused."""
        try:
            plan = plan_of(self._evaluator.refine(how, rows, self.memory, self._limits))
        except PlanError as error:
            self._refused[str(error)] += 1
            return None
        key = str(plan), rows
        if key not in self._found:
            try:
                for refusal in refusals(plan, StepFacts(rows=rows)):
                    raise PlanError(refusal)
                self._found[key] = Candidate(plan, rows, self._evaluator.simulate(plan, rows), goal=self._goal)
            except PlanError as error:
                self._refused[str(error)] += 1
                self._found[key] = None
        return self._found[key]

    def ranked(self) -> list[Candidate]:
        """What fits, best first; of equals the one that takes less memory, and then the shorter line."""
        fits = [each for each in self._found.values() if each is not None and each.step.misses_by(self.memory) <= 0]
        return sorted(fits, key=lambda each: (-each.score, each.step.size, len(str(each.plan)), str(each.plan)))


def _one_a_mesh(ranked: Sequence[Candidate]) -> list[Candidate]:
    found: dict[tuple[object, ...], Candidate] = {}
    for each in ranked:
        how = Parallelism.of(each.plan)
        ranks = (how.batch, how.weights, how.context, how.pipeline, how.experts)
        found.setdefault((each.rows, ranks, each.plan.relaxed_axis, how.homes.any_away), each)
    return list(found.values())[:_SHOWN]


def _front(ranked: Sequence[Candidate]) -> list[Candidate]:
    found: list[Candidate] = []
    for each in ranked:
        if not found or each.step.size < found[-1].step.size * 0.99:
            found.append(each)
    return found


def _with_reasons(found: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """The candidates with why each is before the next."""
    made = []
    for index, each in enumerate(found):
        why = ""
        if index + 1 < len(found):
            after = found[index + 1]
            why = main_difference(after.step, each.step)
            if each.goal.noise is not None and after.rows != each.rows:  # other batches take other numbers of steps
                why = f"comes to the loss {each.score / after.score - 1:.1%} later"
        made.append(replace(each, why=why))
    return tuple(made)


def _lost(
    judge: _Judge, name: str, rows: int, step: RoughStep, winner: Candidate, cluster: Cluster
) -> LostChoice | None:
    """Why the best plan of a well-known strategy lost; None if the winner is one of its plans."""
    if name in names_of(Parallelism.of(winner.plan), cluster.sizes):
        return None
    found = judge.judge(step.choice.how, rows)
    if found is None:
        return None
    missing = found.step.misses_by(judge.memory)
    if missing > 0:
        why = f"does not fit, by {human_bytes(missing)}"
    else:
        slower = winner.score / found.score - 1
        why = f"{slower:.0%} slower: {main_difference(found.step, winner.step)}"
        if slower < 0.005:
            less = found.step.size - winner.step.size
            why = f"as fast, in {human_bytes(abs(less))} {'more' if less > 0 else 'less'} memory"
    return LostChoice(name, found.plan, rows, found.step.seconds, why)


def _say_nothing(what: str, done: int, of: int) -> None:
    pass
