"""Intervals of scores."""

import math

import pytest
import torch

from psm.evaluation.accuracy import topk_accuracy
from psm.evaluation.intervals import accuracy_interval, mean_interval, t_interval, wilson_interval


def test_accuracies_carry_the_wilson_interval_of_their_test_images() -> None:
    scores = torch.eye(8).repeat(5, 1)
    labels = torch.arange(8).repeat(5)
    labels[:10] = (labels[:10] + 1) % 8
    accuracy = topk_accuracy(scores, labels)
    assert (accuracy.top1, accuracy.count) == (75.0, 40)
    low, high = wilson_interval(30, 40)
    assert accuracy.top1_interval == pytest.approx((100 * low, 100 * high))
    assert accuracy.top1_interval == accuracy_interval(75.0, 40)
    assert accuracy.top5_interval.high <= 100


def test_the_mean_of_values_of_images() -> None:
    values = torch.tensor([0.1, 0.5, 0.9, 0.4])
    assert mean_interval(values) == pytest.approx(t_interval(values.double().tolist()))
    assert mean_interval(values[:1]) == (-math.inf, math.inf)
