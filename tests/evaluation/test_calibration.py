"""Temperature and calibration error against slow references, and on logits whose right temperature is known."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from psm.evaluation.calibration import (
    BINS,
    LOWEST,
    calibration_error,
    confidence_bins,
    cross_calibrated,
    fit_temperature,
)


def drawn(seed: int, count: int, classes: int, scale: float = 2.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits (N, C) and labels drawn from their softmax: the right temperature is 1."""
    random = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn(count, classes, generator=random, dtype=torch.float64)
    return logits, torch.multinomial(logits.softmax(1), 1, generator=random).squeeze(1)


@pytest.mark.parametrize("wanted", [0.25, 1.0, 3.0])
def test_the_temperature_of_logits_that_were_scaled_is_the_scale(wanted: float) -> None:
    logits, labels = drawn(0, 20_000, 5)
    assert fit_temperature(wanted * logits, labels) == pytest.approx(wanted, rel=0.03)


def test_no_temperature_of_a_fine_grid_is_more_likely() -> None:
    logits, labels = drawn(1, 300, 4, scale=0.7)
    found = fit_temperature(5 * logits, labels)
    smoothing = 1 / (len(labels) + 2)

    def loss(temperature: float) -> float:
        shares = (5 * logits / temperature).log_softmax(1)
        right = shares[torch.arange(len(labels)), labels]
        return float(-((1 - smoothing) * right + smoothing * shares.mean(1)).mean())

    assert loss(found) <= min(loss(found * 1.01**step) for step in range(-200, 201)) + 1e-12


def test_a_few_images_that_are_all_right_do_not_make_the_classifier_certain() -> None:
    labels = torch.tensor([0, 1, 2, 0, 1])
    logits = torch.nn.functional.one_hot(labels, 3).double()
    temperature = fit_temperature(logits, labels)
    assert temperature > 2 * LOWEST
    assert (logits / temperature).softmax(1).max() < 0.99


@given(st.integers(0, 1000), st.integers(1, 200), st.integers(2, 7))
def test_bins_and_errors_are_those_of_a_loop(seed: int, count: int, classes: int) -> None:
    logits, labels = drawn(seed, count, classes)
    shares = (2 * logits).softmax(1)
    gap, likelihood = 0.0, 0.0
    for place in range(BINS):
        rows = [i for i in range(count) if min(int(shares[i].max() * BINS), BINS - 1) == place]
        if rows:
            confidence = sum(float(shares[i].max()) for i in rows)
            gap += abs(confidence - sum(int(shares[i].argmax() == labels[i]) for i in rows))
    for i in range(count):
        likelihood -= float(shares[i, labels[i]].log())
    found = calibration_error(shares, labels)
    assert found.ece == pytest.approx(100 * gap / count, abs=1e-9)
    assert found.nll == pytest.approx(likelihood / count, rel=1e-9)
    assert sum(b.images for b in confidence_bins(shares, labels)) == count


def test_cross_calibration_never_uses_an_images_own_fold() -> None:
    logits, labels = drawn(2, 200, 3)
    before = cross_calibrated(logits, labels)
    changed = logits.clone()
    changed[7] *= 9  # its own probabilities change by its logits alone, not by a temperature that has seen them
    after = cross_calibrated(changed, labels)
    ratio = lambda shares, row: float(shares[row, 0].log() - shares[row, 1].log())  # noqa: E731
    assert ratio(after, 7) == pytest.approx(9 * ratio(before, 7), rel=1e-9)
    assert (
        calibration_error(cross_calibrated(4 * logits, labels), labels).ece
        < calibration_error((4 * logits).softmax(1), labels).ece
    )
