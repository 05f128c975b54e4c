"""The learning rate, the paper's curve, and the target's momentum, as pure functions of the step."""

import math
from typing import Any

import pytest

from psm.utils.schedule import learning_rate, target_momentum


def test_the_paper_s_curve() -> None:
    steps, warmup = 200 * 195, 20 * 195
    assert learning_rate(0, steps, warmup, 0.1, 1e-4) == pytest.approx(1e-4)
    assert learning_rate(warmup // 2, steps, warmup, 0.1, 1e-4) == pytest.approx((0.1 + 1e-4) / 2)
    assert learning_rate(warmup, steps, warmup, 0.1, 1e-4) == pytest.approx(0.1)
    assert learning_rate((steps + warmup) // 2, steps, warmup, 0.1, 1e-4) == pytest.approx(0.05)
    assert learning_rate(steps - 1, steps, warmup, 0.1, 1e-4) == pytest.approx(0, abs=1e-8)


@pytest.mark.parametrize("warmup", [0, 3, 10])
def test_finite_and_within_bounds(warmup: Any) -> None:
    rates = [learning_rate(step, 10, warmup, 0.1, 1e-4) for step in range(10)]
    assert all(math.isfinite(rate) and 0 <= rate <= 0.1 for rate in rates)


def test_the_momentum_of_the_target_stays_or_rises_to_one() -> None:
    assert [target_momentum(step, 100, 0.99) for step in (0, 50, 100)] == [0.99] * 3
    rising = [target_momentum(step, 100, 0.9, "cosine") for step in range(101)]
    assert rising[0] == 0.9
    assert rising[50] == pytest.approx(0.95)
    assert rising[100] == 1.0
    assert rising == sorted(rising)
    assert target_momentum(7, 40, 0.996, "cosine") == pytest.approx(1 - 0.004 * (math.cos(math.pi * 7 / 40) + 1) / 2)
