"""How well runs turn samples, seconds and bytes into a lower loss, against one of them.

    statistical efficiency   tokens that the first run needs to a loss, over those that this one needs
    throughput               tokens a second
    goodput                  their product: tokens a second, as if each were worth what it is in the first run
                             (Qiao et al. 2021, "Pollux: Co-adaptive Cluster Scheduling for Goodput-Optimized Deep
                             Learning")

The loss is the lowest that every run has reached.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_WINDOW = 20  # training losses are noisy: each stands for the mean over as many steps as this


@dataclass(frozen=True)
class Curve:
    """A run: at each of some moments the loss, and what was spent until then. `waited` are seconds in all."""

    name: str
    loss: tuple[float, ...]
    tokens: tuple[float, ...]
    seconds: tuple[float, ...]
    num_bytes: tuple[float, ...]
    waited: float = 0.0

    def reaches(self, target: float) -> tuple[float, float, float] | None:
        """(tokens, seconds, bytes) at which the loss first is at most `target`, between moments by proportion."""
        for index, loss in enumerate(self.loss):
            if loss <= target:
                if index == 0:
                    return self.tokens[0], self.seconds[0], self.num_bytes[0]
                before = self.loss[index - 1]
                part = (before - target) / (before - loss)
                tokens, seconds, num_bytes = (
                    spent[index - 1] + part * (spent[index] - spent[index - 1])
                    for spent in (self.tokens, self.seconds, self.num_bytes)
                )
                return tokens, seconds, num_bytes
        return None


@dataclass(frozen=True)
class Comparison:
    """One run against the first. `seconds` and `num_bytes` are those to the common loss."""

    name: str
    efficiency: float
    throughput: float
    seconds: float
    num_bytes: float
    waited: float  # of the run's time, the part in which it waited for other ranks to agree

    @property
    def goodput(self) -> float:
        return self.efficiency * self.throughput


def smoothed(steps: Sequence[int], losses: Sequence[float]) -> tuple[float, ...]:
    """Each the mean of those of the last few steps, of which a run may tell only some; of the first ones of all."""
    found = []
    total, first = 0.0, 0
    for index, (step, loss) in enumerate(zip(steps, losses, strict=True)):
        total += loss
        while steps[first] <= step - _WINDOW:
            total -= losses[first]
            first += 1
        found.append(total / (index + 1 - first))
    return tuple(found)


def compare_curves(curves: Sequence[Curve]) -> tuple[float, list[Comparison]]:
    """The loss that all reach, and each run against the first."""
    target = max(min(curve.loss) for curve in curves)
    found = []
    first = curves[0].reaches(target)
    assert first is not None
    for curve in curves:
        spent = curve.reaches(target)
        assert spent is not None
        found.append(
            Comparison(
                curve.name,
                first[0] / spent[0],
                curve.tokens[-1] / curve.seconds[-1],
                spent[1],
                spent[2],
                curve.waited / curve.seconds[-1],
            )
        )
    return target, found
