"""The gradient noise scale: how many rows a batch may have before more of them save few steps.

The gradient of B rows is G plus noise, whose covariance has the trace S/B. The noise scale S/|G|^2 is in rows. Two
gradients of the same weights, of few rows and of many, show both (McCandlish et al. 2018, "An Empirical Model of
Large-Batch Training", appendix A.1). With it, a loss takes steps_min (1 + noise / B) steps of B rows (their eq. 2.11).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

_DECAY = 0.95  # of the running means, for each measurement
_Z = 1.96  # standard errors, of an interval that has 95%
_FEWEST = 8  # measurements from which an interval is told


@dataclass(frozen=True)
class NoiseSample:
    """One measurement. Both numbers are unbiased estimates, and so rough that either may be negative.

    Attributes:
        signal: the estimate of |G|^2, the square of the true gradient's 2-norm.
        noise: the estimate of S, the trace of the covariance of one row's gradient.
    """

    signal: float
    noise: float

    @classmethod
    def of_norms(cls, few_rows: int, few: float, rows: int, all_of_them: float) -> NoiseSample:
        """The measurement from the 2-norms of mean gradients: `few` of `few_rows` rows, `all_of_them` of `rows` rows.

        The few rows may be among the others. Raises ValueError unless `few_rows` is less than `rows`."""
        if not 0 < few_rows < rows:
            raise ValueError(f"two numbers of rows, the first smaller, show noise: not {few_rows} and {rows}")
        small, large = few * few, all_of_them * all_of_them
        signal = (rows * large - few_rows * small) / (rows - few_rows)
        return cls(signal, (small - large) / (1 / few_rows - 1 / rows))


@dataclass
class RunningNoise:
    """Running means of signal and noise, whose ratio is the noise scale: the mean of ratios would be biased."""

    signal: float = 0.0
    noise: float = 0.0
    num: int = 0

    def add(self, sample: NoiseSample) -> None:
        """Take a measurement into the means."""
        self.num += 1
        self.signal += (1 - _DECAY) * (sample.signal - self.signal)
        self.noise += (1 - _DECAY) * (sample.noise - self.noise)

    @property
    def scale(self) -> float | None:
        """The noise scale in rows; None while the measurements are too few to tell it from noise."""
        return self.noise / self.signal if self.num and self.signal > 0 and self.noise > 0 else None


@dataclass(frozen=True)
class NoiseScale:
    """A noise scale, with its confidence interval.

    Attributes:
        rows: the noise scale.
        low: the lower end of the 95% interval; None if it was not measured often enough.
        high: the upper end; infinite if the gradient cannot be told from noise.
        source: where the number is from, in words.
    """

    rows: float
    low: float | None = None
    high: float | None = None
    source: str = field(default="given", compare=False)

    def __str__(self) -> str:
        between = ""
        if self.low is not None and self.high is not None:
            ends = f"between {_count(self.low)} and {_count(self.high)}"
            between = ", 95% " + (ends if self.high < math.inf else f"above {_count(self.low)}")
        return f"{_count(self.rows)} rows ({self.source}{between})"


def _count(rows: float) -> str:
    return f"{rows:,.0f}" if rows >= 10 else f"{rows:.2g}"


def noise_scale(samples: Sequence[NoiseSample], source: str = "measured") -> NoiseScale | None:
    """The noise scale of several measurements, with its interval by Fieller's theorem; None if their mean signal or
    noise is not positive, so that the measurements do not show it."""
    num = len(samples)
    if not num:
        return None
    signal, noise = sum(each.signal for each in samples) / num, sum(each.noise for each in samples) / num
    if signal <= 0 or noise <= 0:
        return None
    found = noise / signal
    if num < _FEWEST:
        return NoiseScale(found, source=source)
    of_signal = sum((each.signal - signal) ** 2 for each in samples) / (num - 1) / num
    of_noise = sum((each.noise - noise) ** 2 for each in samples) / (num - 1) / num
    together = sum((each.signal - signal) * (each.noise - noise) for each in samples) / (num - 1) / num
    # The ratios r for which noise - r signal is no further from 0 than chance: a quadratic in r.
    a, b, c = signal**2 - _Z**2 * of_signal, signal * noise - _Z**2 * together, noise**2 - _Z**2 * of_noise
    root = b * b - a * c
    if a <= 0 or root < 0:  # the signal is not told from 0: any ratio above one may be
        low = (b - math.sqrt(root)) / a if root >= 0 and a else 0.0
        return NoiseScale(found, max(low, 0.0) if low <= found else 0.0, math.inf, source)
    return NoiseScale(found, max((b - math.sqrt(root)) / a, 0.0), (b + math.sqrt(root)) / a, source)


def token_worth(rows: int, noise: float) -> float:
    """The fraction of its rows that a batch would take to the same loss if it were small: 1 / (1 + rows / noise)."""
    return 1 / (1 + rows / noise)


def steps_to_same_loss(rows: int, noise: float, steps: float, of_rows: int) -> float:
    """The steps of `rows` rows that come to where `steps` steps of `of_rows` rows come."""
    return steps * (1 + noise / rows) / (1 + noise / of_rows)


def break_even(rows: int, seconds: float, more_rows: int, more_seconds: float) -> float:
    """The noise scale above which the larger of two batches is faster to a loss, from the seconds of a step of each;
    0 if it always is, and infinite if it never is."""
    if more_seconds <= seconds:
        return 0.0
    gain = seconds / rows - more_seconds / more_rows
    return (more_seconds - seconds) / gain if gain > 0 else math.inf
