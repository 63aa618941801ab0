"""What a search for plans finds: candidates, well-known choices that lost, and why.

A plan whose replicas agree later than at every step trains on other numbers, and how many tokens that costs is not
known before it is measured. It counts RELAXED_WORTH of its tokens per second, which is assumed. A plan that is to come
to a loss soonest counts those of its tokens that a large batch does not waste (cost/noise_scale.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from plait.cost.memory_model import human_bytes
from plait.cost.noise_scale import NoiseScale, break_even, steps_to_same_loss, token_worth
from plait.cost.transformer_step import StepEstimate
from plait.errors import PlanError, Refusal
from plait.plan.plan import Plan
from plait.spec.cluster import Cluster

RELAXED_WORTH = 0.9  # of its tokens per second, for a plan whose replicas agree later; DiLoCo's own paper loses none
USABLE = 0.92  # of a device's memory: the rest is for the driver, buffers of communicators and fragments; assumed


class PlannedStep(Protocol):
    """What a step of a plan takes, as simulated."""

    @property
    def estimate(self) -> StepEstimate: ...
    @property
    def size(self) -> float:
        """Bytes on the device; an estimate if they are far below its memory."""
        ...

    @property
    def parts(self) -> dict[str, float]:
        """The seconds by what they are spent on, in words."""
        ...

    @property
    def seconds(self) -> float: ...
    @property
    def tokens(self) -> int: ...
    @property
    def tokens_per_second(self) -> float: ...
    @property
    def mfu(self) -> float: ...
    @property
    def dollars_per_million_tokens(self) -> float | None: ...
    def misses_by(self, memory: float) -> float:
        """Bytes that the step takes beyond `memory` of a device, or beyond the host's."""
        ...


@dataclass(frozen=True)
class Goal:
    """What plans are ranked by: tokens per second, or the time to a loss.

    Attributes:
        to_loss: whether it is the time to a loss.
        noise: the gradient noise scale; None if it is not known, and batches of different sizes cannot be compared.
        steps: steps of `of_rows` rows that are known, or meant, to come to the loss; 0 if no number is.
        of_rows: the rows of those steps.
    """

    to_loss: bool = False
    noise: NoiseScale | None = None
    steps: int = 0
    of_rows: int = 0

    def worth(self, rows: int, relaxed: bool) -> float:
        """The fraction of its tokens per second that counts, for a plan with a batch of so many rows."""
        found = RELAXED_WORTH if relaxed else 1.0
        return found if self.noise is None else found * token_worth(rows, self.noise.rows)

    def steps_of(self, rows: int) -> float | None:
        """The steps to the loss with batches of so many rows; None if that is not known."""
        if not self.steps or (self.noise is None and rows != self.of_rows):
            return None
        return self.steps if self.noise is None else steps_to_same_loss(rows, self.noise.rows, self.steps, self.of_rows)


TOKENS = Goal()


@dataclass(frozen=True)
class Candidate:
    """A plan that was found.

    Attributes:
        plan: the plan.
        rows: of the global batch.
        step: what it takes.
        why: why it is before the next one.
        goal: what it is ranked by.
    """

    plan: Plan
    rows: int
    step: PlannedStep
    why: str = ""
    goal: Goal = TOKENS

    @property
    def worth(self) -> float:
        """The fraction of its tokens per second that counts."""
        return self.goal.worth(self.rows, bool(self.plan.relaxed_axis))

    @property
    def score(self) -> float:
        """Tokens per second that count, by which candidates are ranked."""
        return self.step.tokens_per_second * self.worth

    @property
    def seconds_to_loss(self) -> float | None:
        """The seconds of all steps to the goal's loss; None if their number is not known."""
        steps = self.goal.steps_of(self.rows)
        relaxed = TOKENS.worth(self.rows, bool(self.plan.relaxed_axis))
        return None if steps is None else steps * self.step.seconds / relaxed

    @property
    def memory(self) -> float:
        """Bytes on the device of the fullest rank."""
        return self.step.estimate.peak_memory


@dataclass(frozen=True)
class LostChoice:
    """A well-known strategy that was not chosen: the best plan of its kind, and why it lost."""

    name: str
    plan: Plan
    rows: int
    seconds: float
    why: str


@dataclass(frozen=True)
class FoundPlans:
    """What a search found.

    Attributes:
        cluster: where plans run.
        memory: bytes that a rank may take.
        best: the fastest plan of each spread of ranks, fastest first.
        front: plans of which none is both faster and smaller, fastest first.
        lost: well-known strategies that were not chosen.
        nearest: if nothing fits, the plan that takes the fewest bytes.
        enough: if nothing fits, the smallest number of devices of this kind that would do; 0 if none was found.
        num_rough: plans that closed forms were computed of.
        num_simulated: plans that were simulated.
        refused: how many of the candidates were refused, by the reason.
        goal: what plans are ranked by.
        of_batches: where that is the time to a loss, the best plan of each size of the batch, ascending.
        rows: the sizes of the batch that were looked at.
    """

    cluster: Cluster
    memory: float
    best: tuple[Candidate, ...]
    front: tuple[Candidate, ...]
    lost: tuple[LostChoice, ...]
    nearest: Candidate | None
    enough: int
    num_rough: int
    num_simulated: int
    refused: tuple[tuple[str, int], ...]
    goal: Goal = TOKENS
    of_batches: tuple[Candidate, ...] = ()
    rows: tuple[int, ...] = ()

    def fitting(self) -> tuple[Candidate, ...]:
        """The best plans. Raises PlanError if none fits, with the nearest and the smallest cluster that would do."""
        if self.best:
            return self.best
        where = f"each of the {self.cluster.num_devices} devices of {self.cluster.name}"
        what, why = f"no plan fits {human_bytes(self.memory)} on {where}", ""
        if self.nearest is not None:
            missing = human_bytes(self.nearest.step.misses_by(self.memory))
            why = f"{self.nearest.plan.title!r} is nearest, and misses by {missing}"
        instead = f"take {self.enough} of these devices" if self.enough else "take devices with more memory"
        raise PlanError(Refusal(what, why, f"{instead}, or a smaller batch"))


def best_between(best: Candidate, others: Sequence[Candidate]) -> tuple[float, float]:
    """The noise scales between which a candidate is faster to a loss than others of other batches, in rows."""
    low, high = 0.0, math.inf

    def counted(each: Candidate) -> float:
        return each.step.seconds / TOKENS.worth(each.rows, bool(each.plan.relaxed_axis))

    for each in others:
        if each.rows < best.rows:
            low = max(low, break_even(each.rows, counted(each), best.rows, counted(best)))
        elif each.rows > best.rows:
            high = min(high, break_even(best.rows, counted(best), each.rows, counted(each)))
    return low, high


def main_difference(slower: PlannedStep, faster: PlannedStep) -> str:
    """What the slower of two steps spends most more on, for as many tokens."""
    less, more = faster.parts, slower.parts
    share = faster.tokens / slower.tokens
    name = max(more, key=lambda each: more[each] * share - less[each])
    if more[name] * share - less[name] < 1e-4 * faster.seconds:
        return "is as fast"
    if name == "compute":
        return f"computes {more[name] * share / max(less[name], 1e-12) - 1:.1%} longer"
    return f"spends {more[name] / slower.seconds:.1%} of its step on {name}, not {less[name] / faster.seconds:.1%}"
