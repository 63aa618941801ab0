"""Search for the plan of a step: closed forms for all that is legal, a simulation of the best few dozen.

    search(evaluator, cluster, rows, limits) -> FoundPlans

An evaluator knows a model. It says which plans are legal (a `PlanSpace`), what each roughly takes, and what one takes
as simulated. Nothing is random: the same input gives the same answer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from plait.cost.found_plans import (
    TOKENS,
    USABLE,
    Candidate,
    FoundPlans,
    Goal,
    LostChoice,
    main_difference,
)
from plait.cost.memory_model import human_bytes
from plait.cost.outline_search import KeptSteps, SearchProgress, devices_enough, explore
from plait.cost.plan_evaluator import PlanEvaluator, RoughStep
from plait.errors import PlanError, Refusal
from plait.plan.legality import refusals
from plait.plan.parallelism import Parallelism
from plait.plan.plan_space import Limits, plan_of
from plait.plan.step_facts import StepFacts
from plait.plan.well_known_plans import names_of
from plait.spec.cluster import Cluster

_SHOWN = 8


def search(
    evaluator: PlanEvaluator,
    cluster: Cluster,
    rows: tuple[int, ...],
    limits: Limits,
    memory: float | None = None,
    progress: SearchProgress | None = None,
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
    kept = explore(evaluator, cluster, rows, limits, limit, tell, smaller, goal)
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
    for _, each, step in kept.named.values():
        judge.judge(step.choice.how, each)  # one of which may be better than its closed form says
    tell("simulated", of, of)
    ranked = judge.ranked()
    if not ranked:
        return _nothing_fits(evaluator, cluster, rows, limits, kept, judge)
    lost = [_lost(judge, name, each, step, ranked[0], cluster) for name, (_, each, step) in kept.named.items()]
    return FoundPlans(
        cluster, limit, _with_reasons(_one_a_mesh(ranked)), _with_reasons(_front(ranked)),
        tuple(sorted((each for each in lost if each is not None), key=lambda each: each.name)),
        None, 0, kept.num, judge.num, judge.refusals(), goal, _of_batches(ranked) if goal.to_loss else (),
        rows,
    )  # fmt: skip


def _of_batches(ranked: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """The best candidate of each size of the batch, ascending."""
    found: dict[int, Candidate] = {}
    for each in ranked:
        found.setdefault(each.rows, each)
    return tuple(found[rows] for rows in sorted(found))


def _nothing_fits(
    evaluator: PlanEvaluator, cluster: Cluster, rows: tuple[int, ...], limits: Limits, kept: KeptSteps, judge: _Judge
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
    enough = devices_enough(evaluator, cluster, rows, limits, judge.memory)
    return FoundPlans(
        cluster, judge.memory, (), (), (), nearest, enough, kept.num, judge.num, judge.refusals(), kept.goal,
        rows=rows,
    )  # fmt: skip


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
        """What fits, best first; of equals the one with all on the device, less memory, and then the shorter line."""

        def order(each: Candidate) -> tuple[object, ...]:
            away, line = Parallelism.of(each.plan).homes.any_away, str(each.plan)
            return -each.score, away, each.step.size, len(line), line

        fits = [each for each in self._found.values() if each is not None and each.step.misses_by(self.memory) <= 0]
        return sorted(fits, key=order)


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
