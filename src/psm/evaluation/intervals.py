"""95 % confidence intervals of scores: of one accuracy, of a mean over images, of a mean over seeds or draws."""

import math

from torch import Tensor

from psm.utils.statistics import CONFIDENCE, Interval, t_interval, t_quantile, wilson_interval

__all__ = ["CONFIDENCE", "Interval", "accuracy_interval", "mean_interval", "t_interval", "wilson_interval"]


def accuracy_interval(percent: float, count: int, confidence: float = CONFIDENCE) -> Interval:
    """Wilson interval, in percent, of an accuracy in percent on so many test images.

    It says how far the accuracy may be off because the test images are a sample. It knows nothing of other seeds.
    """
    low, high = wilson_interval(min(count, max(0.0, percent / 100 * count)), count, confidence)
    return Interval(100 * low, 100 * high)


def mean_interval(values: Tensor, confidence: float = CONFIDENCE) -> Interval:
    """t interval of the mean of one value per image, (N,): of average precisions, for example.

    A single image has no spread: its interval is everything.
    """
    if len(values) < 2:
        return Interval(-math.inf, math.inf)
    values = values.double()
    mean = values.mean().item()
    half = t_quantile(len(values) - 1, confidence) * values.std().item() / math.sqrt(len(values))
    return Interval(mean - half, mean + half)
