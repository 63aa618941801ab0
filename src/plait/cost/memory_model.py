"""The memory that training takes: the formula of the ZeRO paper, a rank's memory as a value, and plans that take less.

(Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", table 1.)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from plait.plan.key_values import Recompute
from plait.plan.plan import Plan
from plait.plan.sharding_plan import ZERO_STAGES

PARAMETERS, GRADIENTS, OPTIMIZER = "parameters", "gradients", "optimizer"
ACTIVATIONS, BUFFERS = "activations", "buffers"
CLASSES = (PARAMETERS, GRADIENTS, OPTIMIZER, ACTIVATIONS, BUFFERS)

PAGE = 4096  # bytes; direct input and output needs addresses, offsets and lengths in multiples of it


def padded(num_bytes: int) -> int:
    """`num_bytes` rounded up to whole pages."""
    return -(-num_bytes // PAGE) * PAGE


@dataclass(frozen=True)
class StateBytes:
    """Bytes per parameter of each class of state; `optimizer` includes float32 copies of the weights."""

    parameters: float
    gradients: float
    optimizer: float


def model_state_bytes(num_parameters: float, stage: int, num_ranks: int, each: StateBytes) -> float:
    """Bytes of parameters, gradients and optimizer state on one of `num_ranks` ranks under ZeRO stage 0 to 3.

    Raises ValueError for another stage, or if `num_ranks` is below 1.
    """
    if stage not in ZERO_STAGES or num_ranks < 1:
        raise ValueError(f"stage {stage} over {num_ranks} ranks; a stage is 0 to 3, over 1 rank or more")
    cuts = ZERO_STAGES[stage]
    optimizer = each.optimizer / (num_ranks if cuts.optimizer else 1)
    gradients = each.gradients / (num_ranks if cuts.gradients else 1)
    parameters = each.parameters / (num_ranks if cuts.parameters else 1)
    return num_parameters * (parameters + gradients + optimizer)


@dataclass(frozen=True)
class RankMemory:
    """Bytes of tensors on one rank over a training step, by class.

    Attributes:
        most: the most bytes of each class at any moment.
        at_peak: the bytes of each class at the moment when their sum is largest.
        moment: that moment, in words.
        saved: activations that live from the end of the forward into the backward.
        start: bytes before the first step, when the whole model lies beside this rank's parts.
        updated: the number of elements that this rank's optimizer updates.
        shared: of the buffers, the most bytes in shared memory, from which other processes read.
    """

    most: Mapping[str, int]
    at_peak: Mapping[str, int]
    moment: str
    saved: int
    start: int
    updated: int
    shared: int = 0

    @property
    def peak(self) -> int:
        """The most bytes at any time, before the first step included."""
        return max(self.step_peak, self.start)

    @property
    def step_peak(self) -> int:
        """The most bytes at any time within a step."""
        return sum(self.at_peak.values())

    def with_more(self, kind: str, num_bytes: int) -> RankMemory:
        """This memory with `num_bytes` more of class `kind` throughout the step."""
        more = {kind: num_bytes}
        return dataclasses.replace(
            self,
            most={c: self.most.get(c, 0) + more.get(c, 0) for c in CLASSES},
            at_peak={c: self.at_peak.get(c, 0) + more.get(c, 0) for c in CLASSES},
        )

    def without_start(self) -> RankMemory:
        """This memory for a model that is built on the meta device, which takes no memory before the first step."""
        return dataclasses.replace(self, start=0)


def single_changes(plan: Plan, num_rows: int) -> list[Plan]:
    """Plans for the same ranks that differ in one key and may take less memory, in the order to try them.

    `num_rows` is the number of rows of the global batch, which the number of microbatches must divide.
    """
    found = plan.cutting_more()
    if plan.recompute.kind != "layer" and plan.backend == "torch":  # XLA decides itself
        found.append(dataclasses.replace(plan, recompute=Recompute("layer")))
    micro = 2 * plan.micro
    while num_rows % (micro * plan.num_batch_parts) == 0:
        found.append(dataclasses.replace(plan, micro=micro))
        micro *= 2
    return found


def changed_words(plan: Plan, other: Plan) -> str:
    """The words of `other` that `plan` does not have, such as `zero=3`."""
    return " ".join(word for word in str(other).split() if word not in str(plan).split())


def human_bytes(number: float) -> str:
    """A size as text: 1536 -> '1.5 KiB'."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1024 or unit == "GiB":
            return f"{number:.0f} B" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1024
    raise AssertionError
