"""`psm worth`: intervals, labels saved and verdicts on made-up cells; a small comparison, continued and refused."""

import csv
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import normalize

import psm
from helpers import needs_browser, page_widths, save_untrained_encoder
from psm.config.schema import ImagesConfig
from psm.config.worth import WorthConfig
from psm.data import ImageDataset, load_dataset
from psm.evaluation.few_labels import draw_labeled, parse_amounts
from psm.finetuning.worth.analysis import analyze, crossed_interval, labels_needed
from psm.finetuning.worth.cells import Cell, CellResult, CellStore, make_cells
from psm.finetuning.worth.progress import WorthProgress
from psm.finetuning.worth.run import WorthResult
from psm.finetuning.worth.train import CellMaker
from psm.reporting.worth_page import write_page
from psm.utils.errors import UserError

IMAGES = 2000


def cells(arm: str, labels: int, accuracy: float, seed: int = 0) -> list[CellResult]:
    """Three draws that get this share of the test images right: the easier images first, as real networks do."""
    random = torch.Generator().manual_seed(1000 * labels + seed)
    results = []
    for draw in range(3):
        hardness = torch.linspace(0, 1, IMAGES) + 0.2 * torch.rand(IMAGES, generator=random)
        right = hardness < hardness.quantile(accuracy)
        results.append(CellResult(Cell(arm, f"{labels} a class", labels, draw), right, 1.0, {}))
    return results


def compared(scratch: dict[int, float], tuned: dict[int, float]) -> Any:
    found = [cells("scratch", labels, accuracy) for labels, accuracy in scratch.items()]
    found += [cells("finetune", labels, accuracy, seed=7) for labels, accuracy in tuned.items()]
    return analyze([result for group in found for result in group])


def test_where_it_gains_at_every_number_of_labels_it_was_worth_it() -> None:
    worth = compared({10: 0.2, 100: 0.4, 1000: 0.6}, {10: 0.4, 100: 0.5, 1000: 0.7})
    assert worth.verdict == "yes"
    few, some, many = worth.gains
    assert few.needed.labels == pytest.approx(100, rel=0.05)
    assert few.saved == pytest.approx(90, abs=6)
    assert some.needed.labels == pytest.approx(math.sqrt(100 * 1000), rel=0.05)  # halfway on a logarithmic scale
    assert many.needed.above
    assert few.gain == pytest.approx(20, abs=0.2)
    assert few.interval.low < 20 < few.interval.high
    assert worth.sentence.startswith("Yes: with 10 labels")
    assert "saved about 220 labels" in worth.sentence
    low, high = some.needed_interval
    assert low.labels < some.needed.labels < high.labels


def test_where_it_loses_the_sentence_says_no() -> None:
    worth = compared({10: 0.5, 100: 0.6}, {10: 0.4, 100: 0.5})
    assert worth.verdict == "no"
    assert worth.sentence.startswith("No: with ")
    assert "training from scratch is the better choice" in worth.sentence
    assert worth.gains[0].saved == 0


def test_a_gain_with_few_labels_only_is_said_in_part() -> None:
    worth = compared({10: 0.2, 100: 0.6}, {10: 0.4, 100: 0.6})
    assert worth.verdict == "few"
    assert worth.sentence.startswith("In part: with 10 labels")
    assert "no gain beyond chance" in worth.sentence


def test_a_point_and_the_gain_over_it_have_one_accuracy() -> None:
    worth = compared({10: 0.1565, 100: 0.2155}, {10: 0.1791, 100: 0.2331})
    points = {(point.arm, point.labels): point.top1 for point in worth.points}
    for gain in worth.gains:
        assert (gain.scratch, gain.top1) == (points["scratch", gain.labels], points[gain.arm, gain.labels])


def test_a_difference_within_chance_is_no_answer() -> None:
    worth = compared({100: 0.6}, {100: 0.603})
    assert worth.verdict == "open"
    assert worth.sentence.startswith("It does not show")
    assert compared({100: 0.6}, {}).sentence.startswith("There is no answer yet")
    assert compared({}, {100: 0.6}).sentence.startswith("There is no answer yet")


def test_a_gain_that_may_be_chance_may_have_saved_nothing() -> None:
    scratch = [*cells("scratch", 10, 0.3), *cells("scratch", 100, 0.6)]
    each = [cells("finetune", 10, accuracy)[draw] for draw, accuracy in enumerate((0.31, 0.36, 0.46))]
    gain = analyze([*scratch, *each]).gains[0]
    assert gain.gain > 0 > gain.interval.low
    assert gain.saved > 0
    assert gain.needed_interval[0].labels == gain.labels


def test_all_labels_not_reaching_it_is_more_than_all() -> None:
    worth = compared({10: 0.2, 100: 0.4}, {10: 0.5, 100: 0.6})
    assert worth.gains[0].needed.above
    assert "pretraining saved more than 90 labels" in worth.sentence


@given(st.lists(st.floats(0.01, 0.99), min_size=2, max_size=6), st.floats(0.01, 0.99))
def test_more_accuracy_never_needs_fewer_labels(levels: list[float], accuracy: float) -> None:
    curve = {10 * 3**place: level for place, level in enumerate(levels)}
    lower, higher = labels_needed(curve, accuracy), labels_needed(curve, min(0.999, accuracy + 0.05))
    assert min(curve) <= lower.labels <= higher.labels * (1 + 1e-9)
    assert higher.labels <= max(curve) * (1 + 1e-9)
    assert lower.above <= higher.above
    assert higher.below <= lower.below
    for labels, level in curve.items():  # what a number of labels reaches needs no more than that number
        assert labels_needed(curve, level).labels <= labels * (1 + 1e-9)


def test_the_interval_covers_the_mean_over_draws_and_images_as_often_as_it_says() -> None:
    """Draws differ by 3 points, images by their ease; about 95 of 100 intervals should hold the true mean."""
    random = torch.Generator().manual_seed(0)
    covered = 0
    for _ in range(200):
        shift = 0.03 * torch.randn(4, 1, generator=random)
        ease = 0.1 * torch.randn(1, 500, generator=random)
        right = torch.rand(4, 500, generator=random) < 0.6 + shift + ease
        low, high = crossed_interval(right)
        covered += low < 0.6 < high
    assert covered >= 182


def test_one_draw_has_the_interval_of_its_images() -> None:
    right = torch.arange(1000) < 300
    low, high = crossed_interval(right[None])
    assert high - low == pytest.approx(2 * 1.962 * math.sqrt(0.3 * 0.7 / 999), rel=1e-3)
    assert crossed_interval(torch.ones(3, 5)) == (1.0, 1.0)


def test_frozen_features_with_all_labels_are_scored_once() -> None:
    labels = torch.arange(4).repeat(25)
    amounts = parse_amounts(["100%", "2", "10%"], "labels")
    found = make_cells(labels, amounts, ["knn", "finetune"], draws=3, seed=0)
    count = {arm: sum(cell.arm == arm and cell.labels == 100 for cell in found) for arm in ("knn", "finetune")}
    assert count == {"knn": 1, "finetune": 3}
    assert len({cell.name for cell in found}) == len(found)
    # 2 a class and 10 % of 25 are both 8 labels: one cell stands for both.
    assert [(cell.labels, cell.draw) for cell in found if cell.arm == "finetune"] == [
        (8, 0), (100, 0), (8, 1), (100, 1), (8, 2), (100, 2),
    ]  # fmt: skip


def test_a_cell_on_disk_comes_back_or_is_computed_again(tmp_path: Path) -> None:
    store = CellStore(tmp_path)
    result = cells("knn", 13, 0.37)[1]
    assert store.read(result.cell) is None
    store.write(result)
    found = store.read(result.cell)
    assert found is not None
    assert torch.equal(found.right, result.right)
    assert found.top1 == result.top1
    text = store.file(result.cell).read_text()
    for damage in (text[:-20], text.replace('"labels": 13', '"labels": 14'), "[]", ""):
        store.file(result.cell).write_text(damage)
        assert store.read(result.cell) is None


def test_the_time_left_follows_the_passes_to_come() -> None:
    now = [100.0]
    progress = WorthProgress(cells=4, done=1, passes=1000, shown=False, clock=lambda: now[0])
    assert progress.left() is None
    now[0] += 30
    progress.advance(300)
    assert progress.left() == pytest.approx(70)
    progress.advance(900)
    assert progress.left() == 0


SMALL = {
    "labels": ["2", "100%"],
    "draws": 1,
    "steps": 2,
    "batch_size": 16,
    "scratch": {"epochs": 1},
    "finetune": {"epochs": 1},
    "progress": False,
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return save_untrained_encoder(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def data() -> ImageDataset:
    found = load_dataset("shapes", ImagesConfig(limit=60, size=16), progress=False)
    assert found.test is not None
    return ImageDataset("shapes", found.train, found.test.select(torch.arange(50)), found.classes)


def test_a_comparison_is_continued_extended_and_refused_under_other_settings(
    run: Any, data: ImageDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, computed, compute = tmp_path / "worth", [], CellMaker.__call__

    def counting(maker: CellMaker, cell: Cell, advance: Any) -> CellResult:
        if len(computed) == 3:
            raise KeyboardInterrupt
        computed.append(cell.name)
        return compute(maker, cell, advance)

    monkeypatch.setattr(CellMaker, "__call__", counting)
    with pytest.raises(KeyboardInterrupt):
        psm.worth(run, data, out, **SMALL)
    assert sorted(path.stem for path in (out / "cells").iterdir()) == sorted(computed)
    monkeypatch.setattr(CellMaker, "__call__", compute)
    result = psm.worth(run, data, out, **SMALL)
    assert len(result.cells) == 4 * 2
    assert not (out / "runs").exists()
    assert len(list(csv.DictReader((out / "results.csv").open()))) == len(result.cells)
    summary = json.loads((out / "summary.json").read_text())
    assert summary["sentence"] == result.worth.sentence
    assert {point["arm"] for point in summary["points"]} == {"scratch", "knn", "logistic", "finetune"}
    assert result.worth.sentence.split(":")[0] in write_page(result).read_text()

    monkeypatch.setattr(CellMaker, "__call__", lambda *_: pytest.fail("a finished cell was computed again"))
    assert psm.worth(run, data, out, **SMALL).worth == result.worth
    for keys, says in (
        ({"steps": 3}, "steps=3 differs from steps=2"),
        ({"scratch": {"epochs": 2}}, r"scratch\.epochs=2 differs from scratch\.epochs=1"),
    ):
        with pytest.raises(UserError, match=says):
            psm.worth(run, data, out, **{**SMALL, **keys})
    with pytest.raises(UserError, match="are of another encoder"):
        psm.worth(save_untrained_encoder(tmp_path / "other", seed=1), data, out, **SMALL)
    monkeypatch.setattr(CellMaker, "__call__", compute)
    more = psm.worth(run, data, out, **{**SMALL, "labels": ["1"], "arms": ["knn"], "draws": 1})
    assert [result.cell.labels for result in more.cells] == [10]


def test_knn_is_that_of_the_images_that_a_draw_gives(run: Any, data: ImageDataset, tmp_path: Path) -> None:
    result = psm.worth(run, data, tmp_path / "w", **{**SMALL, "arms": ["knn"], "labels": ["2"], "draws": 1, "k": 1})
    rows = draw_labeled(data.train.labels, parse_amounts(["2"], "labels")[0], 0, 0)
    encoder = psm.load_encoder(run)
    mean, std = (torch.tensor(x).view(3, 1, 1) for x in (encoder.info.mean, encoder.info.std))
    with torch.inference_mode():
        train, test = (
            normalize(encoder((images.take(at).float() / 255 - mean) / std), dim=1)
            for images, at in ((data.train, rows), (data.test, torch.arange(len(data.test))))
        )
    nearest = data.train.labels[rows][(test @ train.T).argmax(1)]
    assert torch.equal(result.cells[0].right, nearest == data.test.labels)


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"labels": ["0"]}, "labels=0 is no amount of labels"),
        ({"labels": ["200%"]}, "labels=200% is no amount"),
        ({"arms": ["knm"]}, "did you mean 'knn'"),
        ({"checkpoint": ""}, "checkpoint= is missing"),
    ],
)
def test_wrong_settings_are_answered_in_a_sentence(
    tmp_path: Path, run: Any, data: ImageDataset, keys: dict[str, Any], says: str
) -> None:
    given = {"checkpoint": run, **SMALL, **keys}
    with pytest.raises(UserError, match=says):
        psm.worth(given.pop("checkpoint"), data, tmp_path / "w", **given)
    assert not (tmp_path / "w").exists()


def test_a_folder_of_something_else_is_not_touched(tmp_path: Path, run: Any, data: ImageDataset) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(UserError, match="holds no results of `psm worth`"):
        psm.worth(run, data, tmp_path, **SMALL)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


@needs_browser
def test_the_page_fits_a_phone(tmp_path: Path) -> None:
    worth = compared({10: 0.2, 100: 0.4, 1000: 0.6}, {10: 0.4, 100: 0.5, 1000: 0.7})
    about = dict.fromkeys(("checkpoint", "encoder", "method", "pretrained_on", "data"), "x")
    about |= dict.fromkeys(("epoch", "train_images", "test_images", "classes", "size"), 3)
    page = write_page(WorthResult(tmp_path, worth, [], WorthConfig(), about))
    window, document, narrowest, widest = page_widths(page, tmp_path, 500)
    assert document <= window
    assert narrowest > 0.8 * window
    assert widest <= window
