"""Scores in the terminal and on the page."""

from typing import Any

import pytest

from psm.evaluation.intervals import Interval
from psm.evaluation.scores import Estimate, Score
from psm.reporting.run_page import _newest_scores
from psm.reporting.score_table import format_estimate, score_rows, scores_table

ABOUT = {
    "data": "shapes",
    "train_images": 1000,
    "test_images": 400,
    "classes": 10,
    "encoder": "tiny",
    "epoch": 3,
    "which": "last",
}


def knn(top1: Any, k: Any = 20, of: Any = "psm", **more: Any) -> Any:
    values = {"top1": Estimate(top1, Interval(top1 - 1, top1 + 1)), "top5": Estimate(90.0, Interval(89.0, 91.0))}
    return Score(of, "knn", values, ABOUT | {"k": k, "temperature": 0.1} | more)


@pytest.mark.parametrize(
    ("estimate", "text"),
    [
        (Estimate(39.2, Interval(38.25, 40.16)), "39.20 [38.2, 40.2]"),
        (Estimate(0.1312, Interval(0.1251, 0.1374)), "0.131 [0.125, 0.137]"),
        (Estimate(100.0, Interval(99.0, 100.0)), "100.00 [99.0, 100.0]"),
        (Estimate(50.0), "50.00"),
    ],
)
def test_values_carry_their_interval(estimate: Any, text: Any) -> None:
    assert format_estimate(estimate) == text


def test_the_table_has_a_row_for_each_score(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    rank = Score(
        "psm",
        "rankme",
        {"rankme": Estimate(89.26, Interval(88.9, 89.6))},
        ABOUT | {"space": "features", "images_used": 1000},
    )
    scores_table([knn(30.0, of="raw pixels"), knn(35.0, k=5), knn(36.0), rank])
    text = capsys.readouterr().out
    for words in (
        "raw pixels",
        "k = 5, T = 0.1",
        "35.00 [34.0, 36.0]",
        "90.00 [89.0, 91.0]",
        "RankMe",
        "features of 1,000 training images",
        "89.26 [88.9, 89.6]",
        "shapes: 1,000 training and 400 test images, 10 classes; encoder tiny, epoch 3; in brackets: 95 % interval",
    ):
        assert words in text
    assert text.count("psm") == 2  # once in each table


def test_the_page_shows_the_newest_of_each_protocol_and_old_lines_too() -> None:
    old = {"of": "psm", "score": "knn", "top1": 31.0, "top5": 80.0, "protocol": ABOUT | {"k": 20, "temperature": 0.1}}
    lines = [old, knn(35.0, k=5).record(), knn(36.0).record(), knn(20.0, of="raw pixels").record()]
    accuracies, measures = score_rows(_newest_scores(lines))
    assert [(row.of, row.protocol, row.values[0]) for row in accuracies] == [
        ("psm", "k = 20, T = 0.1", "36.00 [35.0, 37.0]"),
        ("psm", "k = 5, T = 0.1", "35.00 [34.0, 36.0]"),
        ("raw pixels", "k = 20, T = 0.1", "20.00 [19.0, 21.0]"),
    ]
    assert not measures
    (row,), _ = score_rows(_newest_scores([old]))
    assert row.values[0] == "31.00 [26.7, 35.7]"
