"""Draws of few labels: stratified, repeatable, nested; scores as means with an interval over the draws."""

from typing import Any

import pytest
import torch

from psm.evaluation.accuracy import Accuracy
from psm.evaluation.few_labels import DrawStats, LabelAmount, draw_labeled, parse_amounts, score_draws
from psm.utils.errors import UserError
from psm.utils.statistics import t_interval

LABELS = torch.tensor([0] * 200 + [1] * 100 + [2] * 30)[torch.randperm(330, generator=torch.Generator().manual_seed(0))]


@pytest.mark.parametrize(
    ("text", "per_class", "shown"),
    [
        ("10%", [20, 10, 3], "10 %"),
        ("1 %", [2, 1, 1], "1 %"),
        ("5", [5, 5, 5], "5 a class"),
        (50, [50, 50, 30], "50 a class"),
    ],
)
def test_amounts(text: Any, per_class: Any, shown: Any) -> None:
    amount = LabelAmount.parse(text)
    assert str(amount) == shown
    chosen = draw_labeled(LABELS, amount, seed=0)
    assert LABELS[chosen].bincount().tolist() == per_class
    assert chosen.tolist() == sorted(set(chosen.tolist()))


@pytest.mark.parametrize("text", ["0", "0%", "101%", "2.5", "-1", "ten", "1%%", ""])
def test_what_is_no_amount_is_refused(text: Any) -> None:
    with pytest.raises(UserError, match=r"few_labels\.amounts=.* is no amount of labels"):
        LabelAmount.parse(text)


def test_amounts_are_taken_once() -> None:
    assert [str(amount) for amount in parse_amounts(["1%", "1 %", 5, "5"])] == ["1 %", "5 a class"]


def test_draws_differ_repeat_and_are_nested() -> None:
    small, large = LabelAmount.parse("5%"), LabelAmount.parse("20%")
    first = draw_labeled(LABELS, small, 0, 0)
    assert torch.equal(first, draw_labeled(LABELS, small, 0, 0))
    assert not torch.equal(first, draw_labeled(LABELS, small, 0, 1))
    assert not torch.equal(first, draw_labeled(LABELS, small, 1, 0))
    assert set(first.tolist()) < set(draw_labeled(LABELS, large, 0, 0).tolist())


def test_a_draw_leaves_the_global_random_state_alone() -> None:
    before = torch.get_rng_state()
    draw_labeled(LABELS, LabelAmount.parse("5"), 0)
    assert torch.equal(before, torch.get_rng_state())


def test_scores_are_means_with_an_interval_over_draws() -> None:
    seen = []

    def score(rows: Any) -> Any:
        seen.append(rows)
        return Accuracy(40.0 + len(seen), 90.0, 1000)

    stats = score_draws(LABELS, LabelAmount.parse("5"), 3, 0, score)
    assert len({tuple(rows.tolist()) for rows in seen}) == 3
    assert stats.top1 == 42.0
    assert stats.top1_interval == t_interval([41.0, 42.0, 43.0])
    assert stats.top5_interval == (90.0, 90.0)


def test_all_labels_are_one_draw_with_the_interval_of_the_test_images() -> None:
    stats = score_draws(LABELS, LabelAmount.parse("100%"), 5, 0, lambda rows: Accuracy(50.0, 90.0, 100))
    assert len(stats.draws) == 1
    assert stats.top1_interval == DrawStats([Accuracy(50.0, 90.0, 100)]).draws[0].top1_interval
    assert 40 < stats.top1_interval.low < 41
