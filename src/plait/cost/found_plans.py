"""What a search for plans finds: candidates, well-known choices that lost, and why.

A plan whose replicas agree later than at every step trains on other numbers, and how many tokens that costs is not
known before it is measured. It counts RELAXED_WORTH of its tokens per second, which is assumed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from plait.cost.memory_model import human_bytes
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
        """Bytes on the device, or about so many where memory is not scarce."""
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
class Candidate:
    """A plan that was found.

    Attributes:
        plan: the plan.
        rows: of the global batch.
        step: what it takes.
        why: why it is before the next one.
    """

    plan: Plan
    rows: int
    step: PlannedStep
    why: str = ""

    @property
    def worth(self) -> float:
        """The fraction of its tokens per second that counts."""
        return RELAXED_WORTH if self.plan.relaxed_axis else 1.0

    @property
    def score(self) -> float:
        """Tokens per second, by which candidates are ranked."""
        return self.step.tokens_per_second * self.worth

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
