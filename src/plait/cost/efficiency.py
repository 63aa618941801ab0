"""Compares runs: the tokens, seconds and bytes that each spends to reach a loss, relative to the first run.

    statistical efficiency   tokens that the first run needs to reach a loss, over those that this run needs
    throughput               tokens per second
    goodput                  their product: tokens per second, weighed by what they are worth in the first run
                             (Qiao et al. 2021, "Pollux: Co-adaptive Cluster Scheduling for Goodput-Optimized Deep
                             Learning")

Runs are compared at the lowest loss that all of them reach.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_WINDOW = 20  # steps over which a training loss is averaged, as it is noisy


@dataclass(frozen=True)
class Curve:
    """The loss of a run at several moments, and the tokens, seconds and bytes spent until each.

    Attributes:
        name: the run.
        loss: the loss at each moment.
        tokens: tokens trained on until each moment.
        seconds: seconds since the run began.
        num_bytes: bytes sent since the run began.
        waited: seconds of the whole run in which it waited to synchronize with other ranks.
    """

    name: str
    loss: tuple[float, ...]
    tokens: tuple[float, ...]
    seconds: tuple[float, ...]
    num_bytes: tuple[float, ...]
    waited: float = 0.0

    def reaches(self, target: float) -> tuple[float, float, float] | None:
        """(tokens, seconds, bytes) spent when the loss first is at most `target`, interpolated between moments.

        Returns None if the run never reaches it.
        """
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
    """One run relative to the first.

    Attributes:
        name: the run.
        efficiency: statistical efficiency.
        throughput: tokens per second.
        seconds: seconds to the common loss.
        num_bytes: bytes to the common loss.
        waited: the fraction of the run's time in which it waited to synchronize with other ranks.
    """

    name: str
    efficiency: float
    throughput: float
    seconds: float
    num_bytes: float
    waited: float

    @property
    def goodput(self) -> float:
        return self.efficiency * self.throughput


def smoothed(steps: Sequence[int], losses: Sequence[float]) -> tuple[float, ...]:
    """The mean of the losses of the last 20 steps up to each loss, or of all steps if there are fewer.

    `steps` are the steps that `losses` belong to; a run may record only some of them.
    """
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
    """Returns the lowest loss that all curves reach, and a comparison of each curve with the first."""
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
