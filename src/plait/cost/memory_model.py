"""What training takes of memory: the ZeRO paper's formula, a rank's share as a value, and the plans to try when it is
too much.

(Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", table 1.)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from plait.plan.plan import Plan
from plait.plan.recompute import Recompute

PARAMETERS, GRADIENTS, OPTIMIZER = "parameters", "gradients", "optimizer"
ACTIVATIONS, BUFFERS = "activations", "buffers"
CLASSES = (PARAMETERS, GRADIENTS, OPTIMIZER, ACTIVATIONS, BUFFERS)


@dataclass(frozen=True)
class StateBytes:
    """Bytes that each parameter of a model takes in each class; `optimizer` includes float32 copies of the weights."""

    parameters: float
    gradients: float
    optimizer: float


MIXED_ADAM = StateBytes(2, 2, 12)  # weights and gradients in half precision; float32 weights and Adam's two moments
FULL_ADAM = StateBytes(4, 4, 8)


def model_state_bytes(num_parameters: float, stage: int, num_ranks: int, each: StateBytes = MIXED_ADAM) -> float:
    """Bytes of parameters, gradients and optimizer state on one of `num_ranks` ranks under a ZeRO stage, 0 to 3."""
    if stage not in range(4) or num_ranks < 1:
        raise ValueError(f"stage {stage} over {num_ranks} ranks; a stage is 0 to 3, over 1 rank or more")
    optimizer = each.optimizer / (num_ranks if stage >= 1 else 1)
    gradients = each.gradients / (num_ranks if stage >= 2 else 1)
    parameters = each.parameters / (num_ranks if stage >= 3 else 1)
    return num_parameters * (parameters + gradients + optimizer)


@dataclass(frozen=True)
class RankMemory:
    """Bytes of tensors on one rank over a training step, by class.

    most       the largest that each class gets, at whatever moment
    at_peak    what each class has when their sum is largest
    moment     when that is, in words
    saved      activations that live from the end of forward into backward
    start      the same sum before the first step, where the model as it was built lies beside this rank's parts
    updated    how many numbers this rank's optimizer updates
    shared     of the buffers, what lies in the memory from which other processes read, at most
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
        """The most of all classes together, the start included."""
        return max(self.step_peak, self.start)

    @property
    def step_peak(self) -> int:
        return sum(self.at_peak.values())

    def with_more(self, kind: str, num_bytes: int) -> RankMemory:
        """With that many bytes more of a class, all the time."""
        more = {kind: num_bytes}
        return dataclasses.replace(
            self,
            most={c: self.most.get(c, 0) + more.get(c, 0) for c in CLASSES},
            at_peak={c: self.at_peak.get(c, 0) + more.get(c, 0) for c in CLASSES},
        )

    def without_start(self) -> RankMemory:
        """As of a model that is built on the meta device."""
        return dataclasses.replace(self, start=0)


def single_changes(plan: Plan, num_rows: int) -> list[Plan]:
    """Plans for the same ranks that differ in one key and may take less memory, in the order in which to try them.

    `num_rows` is the global batch: more microbatches must divide it still.
    """
    found = plan.cutting_more()
    if plan.recompute.kind != "layer":
        found.append(dataclasses.replace(plan, recompute=Recompute("layer")))
    micro = 2 * plan.micro
    while num_rows % (micro * plan.num_batch_parts) == 0:
        found.append(dataclasses.replace(plan, micro=micro))
        micro *= 2
    return found


def changed_words(plan: Plan, other: Plan) -> str:
    """The words of `other` that `plan` does not have: `zero=3`."""
    return " ".join(word for word in str(other).split() if word not in str(plan).split())
