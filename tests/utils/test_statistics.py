"""Confidence intervals: against published quantiles, and by how often they cover the truth."""

import math
import random
import statistics
from typing import Any

import pytest

from psm.utils.statistics import Interval, t_interval, t_quantile, wilson_interval


@pytest.mark.parametrize(
    ("degrees", "expected"),  # two-sided 95 %, from the usual tables
    [(1, 12.7062), (2, 4.3027), (3, 3.1824), (4, 2.7764), (9, 2.2622), (10, 2.2281), (29, 2.0452), (100, 1.9840)],
)
def test_t_quantiles_are_those_of_the_tables(degrees: Any, expected: Any) -> None:
    assert t_quantile(degrees) == pytest.approx(expected, abs=1e-4)


def test_t_quantiles_at_other_levels_and_many_degrees() -> None:
    assert t_quantile(4, 0.99) == pytest.approx(4.604095, abs=1e-6)
    assert t_quantile(1000) - t_quantile(1001) == pytest.approx(t_quantile(1001) - t_quantile(1002), rel=1e-2)
    assert t_quantile(10**7) == pytest.approx(statistics.NormalDist().inv_cdf(0.975), abs=1e-6)
    with pytest.raises(ValueError, match="degrees"):
        t_quantile(0)


def test_t_interval() -> None:
    interval = t_interval([1.0, 2.0, 3.0])
    assert interval == pytest.approx((2 - 4.302653 / math.sqrt(3), 2 + 4.302653 / math.sqrt(3)))
    assert interval.half_width == pytest.approx(2.484138)
    assert t_interval([5.0, 5.0]) == (5.0, 5.0)
    assert t_interval([1.0]) is None
    assert t_interval([]) is None


def test_t_interval_covers_the_mean_of_three_normal_values_in_95_percent_of_cases() -> None:
    draws = random.Random(0)
    covered = sum(7.0 in t_interval([draws.gauss(7, 2) for _ in range(3)]) for _ in range(4000))
    assert covered / 4000 == pytest.approx(0.95, abs=0.011)  # three standard errors


def test_wilson_interval() -> None:
    assert wilson_interval(50, 100) == pytest.approx((0.403832, 0.596168), abs=1e-6)
    assert wilson_interval(0, 10) == pytest.approx((0, 0.277533), abs=1e-6)
    assert wilson_interval(20, 20) == pytest.approx((0.838875, 1), abs=1e-6)
    with pytest.raises(ValueError, match="no proportion"):
        wilson_interval(3, 2)
    with pytest.raises(ValueError, match="no proportion"):
        wilson_interval(0, 0)


@pytest.mark.parametrize("share", [0.02, 0.5, 0.97])
def test_wilson_interval_covers_the_share_in_about_95_percent_of_cases(share: Any) -> None:
    draws = random.Random(1)
    hits = [sum(draws.random() < share for _ in range(200)) for _ in range(1000)]
    assert sum(share in wilson_interval(k, 200) for k in hits) / 1000 == pytest.approx(0.95, abs=0.035)


def test_an_interval_holds_its_ends() -> None:
    assert 1 in Interval(1, 2)
    assert 2.5 not in Interval(1, 2)
