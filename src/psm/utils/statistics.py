"""Confidence intervals of a proportion and of a mean, in plain Python. Imports nothing heavy."""

import math
import statistics
from collections.abc import Iterable
from functools import cache
from typing import NamedTuple

CONFIDENCE = 0.95
MANY_DEGREES = 1000


class Interval(NamedTuple):
    """A confidence interval, both ends included."""

    low: float
    high: float

    @property
    def half_width(self) -> float:
        return (self.high - self.low) / 2

    def __contains__(self, value: object) -> bool:
        return isinstance(value, (int, float)) and self.low <= value <= self.high


def wilson_interval(successes: float, trials: int, confidence: float = CONFIDENCE) -> Interval:
    """Wilson score interval of a proportion, within [0, 1]: of an accuracy, from the test images that are right.

    Unlike the normal approximation it keeps its coverage near 0 and 1 and has a width there: of 20 right out of 20 it
    says 0.84 to 1.

    Args:
        successes: number of successes.
        trials: number of trials, 1 or more.
        confidence: probability that such an interval covers the true proportion.
    """
    if trials < 1 or not 0 <= successes <= trials:
        raise ValueError(f"{successes} successes of {trials} trials are no proportion")
    z = normal_quantile(confidence)
    share, square = successes / trials, z * z / trials
    center = (share + square / 2) / (1 + square)
    half = z / (1 + square) * math.sqrt(share * (1 - share) / trials + square / (4 * trials))
    low = 0.0 if successes == 0 else max(0.0, center - half)  # exact at the ends, where rounding would miss them
    high = 1.0 if successes == trials else min(1.0, center + half)
    return Interval(low, high)


def t_interval(values: Iterable[float], confidence: float = CONFIDENCE) -> Interval | None:
    """Student's t interval of the mean of n independent values, with n - 1 degrees of freedom.

    For scores over seeds or over draws of labels, and for their differences pair by pair. None for fewer than two
    values: one run says nothing of the spread.
    """
    values = list(values)
    if len(values) < 2:
        return None
    mean = statistics.fmean(values)
    half = t_quantile(len(values) - 1, confidence) * statistics.stdev(values) / math.sqrt(len(values))
    return Interval(mean - half, mean + half)


def normal_quantile(confidence: float = CONFIDENCE) -> float:
    """The z for which a standard normal variable lies within [-z, z] with this probability."""
    return statistics.NormalDist().inv_cdf((1 + confidence) / 2)


@cache
def t_quantile(degrees: int, confidence: float = CONFIDENCE) -> float:
    """The t for which a Student variable of so many degrees of freedom lies within [-t, t] with this probability."""
    if degrees < 1:
        raise ValueError(f"{degrees} degrees of freedom: at least 1 is needed")
    if degrees > MANY_DEGREES:  # the expansion about the normal quantile, here exact to ten digits
        z = normal_quantile(confidence)
        return z + (z**3 + z) / (4 * degrees) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees**2)
    low, high = 0.0, math.pi / 2  # of the angle atan(t / sqrt(degrees)), in which the probability is smooth and bounded
    while True:
        angle = (low + high) / 2
        if angle in (low, high):  # neighbors in floating point
            return math.tan(angle) * math.sqrt(degrees)
        low, high = (angle, high) if _t_probability(angle, degrees) < confidence else (low, angle)


def _t_probability(angle: float, degrees: int) -> float:
    """P(|T| <= sqrt(degrees) tan(angle)), by the finite series of Abramowitz and Stegun 26.7.3 and 26.7.4."""
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = degrees % 2
    term = cosine if odd else 1.0
    total = term if degrees > 1 else 0.0
    for n in range(2 + odd, degrees, 2):
        term *= (n - 1) / n * cosine * cosine
        total += term
    return 2 / math.pi * (angle + sine * total) if odd else sine * total
