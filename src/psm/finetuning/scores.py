"""What a trained classifier reaches: accuracy with its interval, calibration, and where it goes wrong."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from psm.data import ImageStore
from psm.evaluation.accuracy import topk_accuracy
from psm.evaluation.calibration import (
    CalibrationError,
    ConfidenceBin,
    calibration_error,
    confidence_bins,
    cross_calibrated,
    fit_temperature,
)
from psm.evaluation.features import extract
from psm.models.classifier import Classifier, calibrated
from psm.utils.statistics import wilson_interval
from psm.views.transform import Views

MOST_CONFUSED = 20  # pairs of classes that are kept
MOST_MISTAKES = 24  # images that are kept
MATRIX_UP_TO = 30  # classes


@dataclass(frozen=True)
class PartScores:
    """A classifier on the images of one part, the validation or the test images."""

    images: int
    top1: float  # in percent
    top5: float
    interval: list[float]  # 95 % interval of top-1 (Wilson), in percent
    uncalibrated: CalibrationError  # at temperature 1
    calibrated: CalibrationError | None  # validation: by temperatures fitted on other folds; None if not calibrated
    bins: list[ConfidenceBin]  # calibrated where it is
    per_class: list[list[int]]  # right and all images of each class
    confused: list[list[int]]  # true class, predicted class, images; the most frequent first
    matrix: list[list[int]] | None  # images by true (row) and predicted class, for few classes
    mistakes: list[dict[str, Any]]  # image, label, predicted, probability; the most certain first


@dataclass(frozen=True)
class ClassifierScores:
    """A classifier after some epoch. The test images served neither training nor any choice."""

    epoch: int
    temperature: float | None  # None without validation images
    validation: PartScores | None
    test: PartScores | None


def score_classifier(
    classifier: Classifier, views: Views, epoch: int, validation: ImageStore | None, test: ImageStore | None
) -> ClassifierScores:
    """Fit the temperature on the validation images and score both parts.

    Args:
        classifier: on the device to compute on.
        views: prepares images without augmentation.
        epoch: that its weights are of.
        validation: held-out training images with labels, or None.
        test: test images with labels, or None.
    """
    temperature, held_out, tested = None, None, None
    if validation is not None:
        logits, labels = _logits(classifier, validation, views)
        temperature = fit_temperature(logits, labels)
        held_out = _score(logits, labels, cross_calibrated(logits, labels))
    if test is not None:
        logits, labels = _logits(classifier, test, views)
        tested = _score(logits, labels, None if temperature is None else calibrated(logits, temperature))
    return ClassifierScores(epoch, temperature, held_out, tested)


def _logits(classifier: Classifier, images: ImageStore, views: Views) -> tuple[Tensor, Tensor]:
    assert images.labels is not None
    return extract(classifier, images, views), images.labels


def _score(logits: Tensor, labels: Tensor, probabilities: Tensor | None) -> PartScores:
    """Scores of logits (N, C) and, where the classifier is calibrated, probabilities (N, C)."""
    accuracy = topk_accuracy(logits, labels)
    plain = calibrated(logits, 1.0)
    shown = plain if probabilities is None else probabilities
    predicted = logits.argmax(1)
    right = predicted == labels
    interval = wilson_interval(int(right.sum()), len(labels))
    classes = logits.shape[1]
    counts = labels.bincount(minlength=classes)
    hits = labels[right].bincount(minlength=classes)
    return PartScores(
        images=len(labels),
        top1=accuracy.top1,
        top5=accuracy.top5,
        interval=[100 * interval.low, 100 * interval.high],
        uncalibrated=calibration_error(plain, labels),
        calibrated=None if probabilities is None else calibration_error(probabilities, labels),
        bins=confidence_bins(shown, labels),
        per_class=torch.stack([hits, counts], 1).tolist(),
        confused=_confused(labels[~right], predicted[~right], classes),
        matrix=_matrix(labels, predicted, classes) if classes <= MATRIX_UP_TO else None,
        mistakes=_mistakes(shown, labels, predicted, right),
    )


def _confused(labels: Tensor, predicted: Tensor, classes: int) -> list[list[int]]:
    """True class, predicted class and number of images of the most frequent mistakes."""
    pairs, counts = (labels * classes + predicted).unique(return_counts=True)
    order = counts.argsort(descending=True, stable=True)[:MOST_CONFUSED]
    return torch.stack([pairs[order] // classes, pairs[order] % classes, counts[order]], 1).tolist()


def _matrix(labels: Tensor, predicted: Tensor, classes: int) -> list[list[int]]:
    return (labels * classes + predicted).bincount(minlength=classes**2).view(classes, classes).tolist()


def _mistakes(probabilities: Tensor, labels: Tensor, predicted: Tensor, right: Tensor) -> list[dict[str, Any]]:
    confidence = probabilities.max(1).values
    wrong = (~right).nonzero().flatten()
    order = wrong[confidence[wrong].argsort(descending=True, stable=True)][:MOST_MISTAKES]
    return [
        {
            "image": image,
            "label": int(labels[image]),
            "predicted": int(predicted[image]),
            "probability": round(float(confidence[image]), 4),
        }
        for image in order.tolist()
    ]
