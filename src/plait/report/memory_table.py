"""The text of `plait memory`: a table of each rank's bytes by class."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from plait.cost.memory_model import (
    ACTIVATIONS,
    CLASSES,
    OPTIMIZER,
    RankMemory,
    StateBytes,
    changed_words,
    human_bytes,
    model_state_bytes,
)
from plait.plan.axes import stage_axis, zero_axis
from plait.plan.plan import Plan
from plait.plan.sharding_plan import ZERO_STAGES

_DEGREES = (1, 4, 16, 64, 256, 1024)  # numbers of ranks, as in the table of the ZeRO paper


@dataclass(frozen=True)
class MemoryEstimate:
    """The memory that a plan's step takes on each rank.

    Attributes:
        plan: the plan.
        num_parameters: the number of elements of the model's parameters.
        ranks: groups of ranks that take the same memory, each with that memory.
    """

    plan: Plan
    num_parameters: int
    ranks: tuple[tuple[tuple[int, ...], RankMemory], ...]

    @property
    def fullest(self) -> RankMemory:
        """The memory of the rank that takes the most."""
        return max((each for _, each in self.ranks), key=lambda each: each.peak)

    @property
    def peak(self) -> int:
        """Bytes on the fullest rank."""
        return self.fullest.peak

    def rank(self, number: int) -> RankMemory:
        """The memory of rank `number`."""
        return next(each for ranks, each in self.ranks if number in ranks)

    def fits(self, limit: int) -> bool:
        """Whether every rank stays within `limit` bytes."""
        return self.peak <= limit

    def __str__(self) -> str:
        lines = [f"plan {self.plan.title}, {self.num_parameters:,} parameters", ""]
        lines.append(_line("rank", *CLASSES, "peak"))
        for ranks, each in self.ranks:
            lines.append(_line(_names(ranks), *(_bytes(each.most.get(c, 0)) for c in CLASSES), _bytes(each.peak)))
            at_peak = [_bytes(each.at_peak.get(c, 0)) for c in CLASSES]
            lines.append(_line("  at the peak", *at_peak, _bytes(each.step_peak)))
        lines.append("")
        for ranks, each in self.ranks:
            who = f"rank {_names(ranks)}: " if len(self.ranks) > 1 else ""
            lines.append(f"{who}the peak of a step is in {each.moment}")
            lines.append(f"{who}{_bytes(each.saved)} of {ACTIVATIONS} live on from forward to backward")
            if each.start > each.step_peak:
                lines.append(
                    f"{who}before the first step the whole model lies beside this rank's parts: {_bytes(each.start)};"
                    " build it on the meta device to save that"
                )
        if self.plan.shares_parameters:
            num = self.plan.mesh.axis_size(zero_axis())
            lines.append(
                f"of parameters in memory that {zero_axis()}={num} ranks have in common each is"
                f" counted its part: 1 / {num}"
            )
        elsewhere = [word for word in str(self.plan).split() if word.startswith("home.")]
        if elsewhere:
            lines.append(f"counted as if it were on the device: what is elsewhere by {' '.join(elsewhere)}")
        return "\n".join([*lines, "", *self._formula()])

    def _formula(self) -> list[str]:
        """A table of parameters, gradients and optimizer state by the formula of the ZeRO paper, over N ranks."""
        each = self._state_bytes()
        said = f"({each.parameters:g} + {each.gradients:g} + {each.optimizer:.3g}) x {self.num_parameters:,} bytes"
        lines = [f"model state of a rank by the formula of ZeRO, {said}, over N ranks of {zero_axis()}"]
        stages = [stage for stage, cuts in ZERO_STAGES.items() if cuts.optimizer]
        lines.append(_line("N", *(f"zero={stage}" for stage in stages)))
        for num in _DEGREES:
            row = (_bytes(model_state_bytes(self.num_parameters, stage, num, each)) for stage in stages)
            lines.append(_line(str(num), *row))
        return lines

    def _state_bytes(self) -> StateBytes:
        """Bytes per parameter by the paper, which counts float32 copies of weights as optimizer state."""
        each = self.fullest.most.get(OPTIMIZER, 0) / max(self.fullest.updated, 1)
        return StateBytes(4, 4, each) if self.plan.precision == "fp32" else StateBytes(2, 2, 4 + each)


def verdict(found: MemoryEstimate, limit: int, tried: Sequence[MemoryEstimate]) -> str:
    """A sentence that says whether a plan stays within `limit` bytes on every rank, and if not, which of the plans in
    `tried` does."""
    if found.fits(limit):
        return f"fits: {_bytes(found.peak)} of {_bytes(limit)}"
    text = f"does not fit: {_bytes(found.peak)}, and the limit is {_bytes(limit)}{_too_large(found, limit)}"
    best = min(tried, key=lambda each: each.peak, default=None)
    if best is None:
        return f"{text}; there is no smaller plan for these ranks to try: use more of them, or a smaller batch"
    words = changed_words(found.plan, best.plan)
    if best.fits(limit):
        return f"{text}; with {words} it would: {_bytes(best.peak)}"
    return (
        f"{text}; no single change of the plan would do, {words} comes nearest: {_bytes(best.peak)}. Combine changes,"
        " use more ranks, or a smaller batch"
    )


def _too_large(found: MemoryEstimate, limit: int) -> str:
    """The ranks of a pipeline that exceed the limit, and by how much, as text."""
    mesh = found.plan.mesh
    axis = stage_axis()
    if mesh.axis_size(axis) == 1:
        return ""
    over: dict[int, int] = {}
    for ranks, each in found.ranks:
        for rank in ranks:
            place = mesh.coordinates(rank)[axis]
            over[place] = max(over.get(place, 0), each.peak - limit)
    places = (f"{axis}={place} {_bytes(over[place])} too much" for place in sorted(over) if over[place] > 0)
    return f" ({', '.join(places)})"


def _line(first: str, *cells: str) -> str:
    return f"{first:14}" + "".join(f"{cell:>14}" for cell in cells)


def _bytes(number: float) -> str:
    return human_bytes(number) if number else "-"


def _names(ranks: tuple[int, ...]) -> str:
    """`0-3` for consecutive ranks, else `0, 2`."""
    first, last = ranks[0], ranks[-1]
    if len(ranks) > 1 and last - first == len(ranks) - 1:
        return f"{first}-{last}"
    return ", ".join(map(str, ranks))
