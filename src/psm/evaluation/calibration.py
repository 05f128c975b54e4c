"""Calibration of a classifier: one temperature for its logits, and how far probabilities are from frequencies."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import nll_loss

BINS = 15  # of the confidence, equally wide
FOLDS = 5
LOWEST, HIGHEST = 0.02, 50.0  # temperatures that are looked for


@dataclass(frozen=True)
class CalibrationError:
    """How far probabilities are off, over some images."""

    ece: float  # expected calibration error, in percent
    nll: float  # mean negative log-likelihood of the true class


@dataclass(frozen=True)
class ConfidenceBin:
    """Images whose most probable class has about the same probability."""

    images: int
    confidence: float  # mean probability of the predicted class
    accuracy: float  # share of them that are right


def fit_temperature(logits: Tensor, labels: Tensor) -> float:
    """The temperature that makes labels (N,) most likely when logits (N, C) are divided by it (Guo et al. 2017).

    Found by bisection: the likelihood is concave in the inverse temperature. The target has 1 / (N + 2) of its mass
    spread over all classes, after Platt, so that a few images that are all classified right do not make the classifier
    certain.
    """
    logits = logits.double()
    smoothing = 1 / (len(labels) + 2)
    wanted = (1 - smoothing) * logits.gather(1, labels[:, None]).squeeze(1) + smoothing * logits.mean(1)

    def slope(inverse: float) -> float:
        """Derivative of the loss with respect to the inverse temperature, which grows with it."""
        return float(((logits * inverse).softmax(1).mul(logits).sum(1) - wanted).mean())

    low, high = 1 / HIGHEST, 1 / LOWEST
    for _ in range(60):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if slope(middle) < 0 else (low, middle)
    return 1 / (low * high) ** 0.5


def calibration_error(probabilities: Tensor, labels: Tensor) -> CalibrationError:
    """Expected calibration error over 15 bins and negative log-likelihood of probabilities (N, C)."""
    bins = confidence_bins(probabilities, labels)
    gap = sum(b.images * abs(b.confidence - b.accuracy) for b in bins if b.images) / len(labels)
    likelihood = nll_loss(probabilities.double().clamp(min=1e-300).log(), labels)
    return CalibrationError(100 * gap, likelihood.item())


def confidence_bins(probabilities: Tensor, labels: Tensor) -> list[ConfidenceBin]:
    """The images of probabilities (N, C) by the probability of their predicted class, in 15 equally wide bins."""
    confidence, predicted = probabilities.double().max(1)
    right = (predicted == labels).double()
    place = (confidence * BINS).long().clamp(max=BINS - 1)
    counts, confidences, rights = (
        torch.zeros(BINS, dtype=torch.float64).index_add_(0, place, values)
        for values in (torch.ones_like(confidence), confidence, right)
    )
    filled = counts.clamp(min=1)
    columns = (counts.long(), confidences / filled, rights / filled)
    return [ConfidenceBin(*row) for row in zip(*(column.tolist() for column in columns), strict=True)]


def cross_calibrated(logits: Tensor, labels: Tensor) -> Tensor:
    """Probabilities (N, C) of each image by the temperature of the other images, in five folds.

    The error of these is that of a temperature on images that it was not fitted on.
    """
    probabilities = torch.empty_like(logits)
    for held in _folds(labels):
        others = ~held
        temperature = fit_temperature(logits[others], labels[others]) if others.any() else 1.0
        probabilities[held] = (logits[held] / temperature).softmax(1)
    return probabilities


def _folds(labels: Tensor) -> Iterator[Tensor]:
    """Masks (N,) of the folds, each with its part of every class."""
    order = labels.argsort(stable=True)
    fold = torch.empty_like(labels)
    fold[order] = torch.arange(len(labels)) % FOLDS
    for number in range(min(FOLDS, len(labels))):
        yield fold == number
