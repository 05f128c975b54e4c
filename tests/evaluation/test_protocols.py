"""Every kind of score of a run: as `psm evaluate` gives, stores and reads it."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import psm
from psm.config.schema import ImagesConfig, ViewsConfig
from psm.data import ImageDataset, ImageStore
from psm.evaluation.evaluate import run_evaluation
from psm.evaluation.intervals import accuracy_interval, t_interval
from psm.evaluation.scores import Score, linear_name
from psm.utils.errors import UserError


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from helpers import SMALL

    out = tmp_path_factory.mktemp("runs") / "a"
    psm.pretrain(out, **SMALL | {"epochs": 1})
    return out


@pytest.fixture(scope="module")
def data() -> Any:
    """The run's training images, and few test images: scoring many of them takes most of a test's time."""
    loaded = psm.load_dataset("shapes", ImagesConfig(limit=100, size=16), False)
    return replace(loaded, test=loaded.test.select(torch.arange(150)))


KEYS = {
    "progress": False,
    "linear": {"epochs": 2},
    "knn": {"k": [5, 20], "temperature": [0.07, 0.1]},
    "few_labels": {"amounts": ["10%", "2"], "draws": 3, "classifiers": ["logistic", "knn", "linear"]},
    "logistic": {"c_grid": [0.01, 0.1]},
    "lidar": {"images": 40, "views": 3},
}


@pytest.fixture(scope="module")
def scores(run: Any, data: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    out = tmp_path_factory.mktemp("scores")
    return psm.evaluate(run, data=data, scores=["all"], out=str(out), **KEYS), out


def test_all_scores_in_order_each_with_an_interval(scores: Any) -> None:
    kinds = [score.score for score in scores[0]]
    assert kinds == [
        *["knn"] * 4, "linear", "logistic", *["few_labels"] * 6, "retrieval", "clusters", "rankme", "lidar"
    ]  # fmt: skip
    for score in scores[0]:
        for name, estimate in score.estimates.items():
            assert estimate.interval.low <= estimate.value <= estimate.interval.high, (score.score, name)


def test_knn_has_a_row_for_each_combination(scores: Any) -> None:
    rows = [score.protocol for score in scores[0] if score.score == "knn"]
    assert [(row["k"], row["temperature"]) for row in rows] == [(5, 0.07), (5, 0.1), (20, 0.07), (20, 0.1)]


def test_few_labels_are_means_over_draws(scores: Any) -> None:
    rows = [score for score in scores[0] if score.score == "few_labels"]
    assert [(row.protocol["labels"], row.protocol["classifier"]) for row in rows] == [
        (amount, name) for amount in ("10 %", "2 a class") for name in ("logistic", "knn", "linear")
    ]
    for row in rows:
        draws = row.protocol["draw_top1"]
        assert len(draws) == row.protocol["draws"] == 3
        assert row.top1 == pytest.approx(sum(draws) / 3)
        assert row.estimates["top1"].interval == t_interval(draws)


def test_one_accuracy_has_the_interval_of_its_test_images(scores: Any) -> None:
    for score in scores[0]:
        if score.score in ("knn", "linear", "logistic"):
            expected = accuracy_interval(score.top1, score.protocol["test_images"])
            assert score.estimates["top1"].interval == expected


def test_lines_of_scores_jsonl_read_back(scores: Any) -> None:
    found, out = scores
    lines = [json.loads(line) for line in (out / "scores.jsonl").read_text().splitlines()]
    assert len(lines) == len(found)
    for line, score in zip(lines, found, strict=True):
        again = Score.from_record(line)
        assert (again.of, again.score, again.describe()) == (score.of, score.score, score.describe())
        assert again.estimates == score.estimates
    assert lines[0]["top1_interval"] == list(found[0].estimates["top1"].interval)
    assert lines[-1]["lidar_interval"][0] < lines[-1]["lidar"] < lines[-1]["lidar_interval"][1]


def test_lines_of_before_there_were_intervals_still_read() -> None:
    used = {"epochs": 100, "batch_size": 256, "lr": 0.1, "lr_grid": None, "momentum": 0.9, "weight_decay": 0.0}
    line = {"of": "psm", "score": "linear", "top1": 45.0, "top5": 90.0, "at": "2025"}
    score = Score.from_record(line | {"protocol": used | {"augment": False, "test_images": 400}})
    assert score.top1 == 45.0
    assert score.estimates["top1"].interval == accuracy_interval(45.0, 400)
    assert score.describe() == "the paper's protocol: 100 epochs, lr 0.1"


def test_the_papers_protocol_is_named() -> None:
    paper = {"epochs": 100, "batch_size": 256, "lr": 0.1, "momentum": 0.9, "weight_decay": 0.0, "augment": False}
    assert linear_name(paper) == "paper"
    assert linear_name(paper | {"lr_grid": [0.1]}) == "paper"
    assert linear_name(paper | {"epochs": 20}) == "one rate"
    assert linear_name(paper | {"lr_grid": [0.1, 0.01]}) == "rate chosen on held-out training images"


def test_a_chosen_rate_says_so_and_stores_the_whole_choice(run: Any, data: Any, tmp_path: Path) -> None:
    keys = {"linear": {"epochs": 2, "lr_grid": [0.2, 0.02, 0.002]}, "scores": ["linear"], "progress": False}
    (score,) = psm.evaluate(run, data=data, out=str(tmp_path), **keys)
    assert score.protocol["name"] == "rate chosen on held-out training images"
    held_out = score.protocol["held_out_top1"]
    assert score.protocol["lr"] == [0.2, 0.02, 0.002][held_out.index(max(held_out))]
    assert f"lr {score.protocol['lr']:g}, best of 3 on held-out training images" in score.describe()


def test_held_out_training_images_may_be_scored_instead(run: Any, tmp_path: Path) -> None:
    """`images.holdout=0.1`: no test image is looked at, and the protocol says so."""
    evaluation = run_evaluation(
        {"checkpoint": str(run), "images.holdout": 0.1, "scores": ["knn"], "out": str(tmp_path), "progress": False}
    )
    (score,) = evaluation.scores
    assert (score.protocol["train_images"], score.protocol["test_images"]) == (90, 10)
    assert score.held_out
    assert score.describe() == "k = 20, T = 0.1, on held-out training images"


def test_choices_do_not_depend_on_the_test_images(run: Any, tmp_path: Path) -> None:
    """The same training images with other test images: rate and C stay, whatever the test images are."""
    random = torch.Generator().manual_seed(0)
    labels = torch.arange(90) % 3
    pixels = torch.randint(0, 255, (90, 3, 16, 16), generator=random, dtype=torch.uint8)
    pixels[:, 0] = (labels * 80)[:, None, None].to(torch.uint8)
    keys = {"linear": {"epochs": 3, "lr_grid": [0.1, 0.01, 0.001]}, "scores": ["linear", "logistic"], "progress": False}
    chosen = []
    for seed in range(2):
        random = torch.Generator().manual_seed(10 + seed)
        test = ImageStore(
            torch.randint(0, 255, (30, 3, 16, 16), generator=random, dtype=torch.uint8),
            torch.randint(3, (30,), generator=random),
        )
        data = ImageDataset("made", ImageStore(pixels, labels), test, ("a", "b", "c"))
        scores = psm.evaluate(run, data=data, out=str(tmp_path), **keys)
        chosen.append([(s.protocol.get("lr"), s.protocol.get("c"), s.protocol["held_out_top1"]) for s in scores])
    assert chosen[0] == chosen[1]


def test_ranks_need_no_labels(run: Any, tmp_path: Path) -> None:
    pixels = torch.randint(0, 255, (60, 3, 16, 16), dtype=torch.uint8)
    blind = ImageDataset("blind", ImageStore(pixels), None, ())
    keys = {"lidar": {"images": 20, "views": 2}, "out": str(tmp_path), "progress": False}
    scores = psm.evaluate(run, data=blind, scores=["rankme", "lidar"], **keys)
    assert [score.score for score in scores] == ["rankme", "lidar"]
    with pytest.raises(UserError, match=r"has no labels to score with.*scores=\[rankme,lidar\], which need none"):
        psm.evaluate(run, data=blind, **keys)


def test_ranks_of_projections(run: Any, data: Any, tmp_path: Path) -> None:
    keys = {"scores": ["rankme"], "rankme": {"space": "projections"}, "out": str(tmp_path), "progress": False}
    for source in (run, run / "checkpoints" / "last.ckpt"):
        (score,) = psm.evaluate(source, data=data, **keys)
        assert score.protocol["width"] == 12
        assert score.describe().startswith("projections of 100 training images")
    (tmp_path / "lone").mkdir()
    lone = tmp_path / "lone" / "encoder.safetensors"
    lone.write_bytes((run / "encoder.safetensors").read_bytes())
    with pytest.raises(UserError, match=r"rankme\.space=projections needs the projector"):
        psm.evaluate(lone, data=data, **keys)


def test_baselines_have_no_projections_and_pixels_no_rank(run: Any, data: Any, tmp_path: Path) -> None:
    scores = psm.evaluate(run, data=data, baselines=True, scores=["knn", "rankme"], out=str(tmp_path), progress=False)
    assert [(s.of, s.score) for s in scores] == [
        ("raw pixels", "knn"),
        ("untrained encoder", "knn"),
        ("untrained encoder", "rankme"),
        ("psm", "knn"),
        ("psm", "rankme"),
    ]


def test_lidar_sees_the_views_of_the_run(run: Any, data: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from psm.evaluation import evaluate as module

    made = []

    class Spy(module.Views):
        def __init__(self, config: Any, *more: Any) -> None:
            made.append(config)
            super().__init__(config, *more)

    monkeypatch.setattr(module, "Views", Spy)
    psm.evaluate(run, data=data, scores=["lidar"], lidar={"images": 20, "views": 2}, out=str(tmp_path), progress=False)
    assert made[1] == ViewsConfig(size=16)  # as the run had them: defaults


def test_features_are_extracted_once_for_all_scores(
    run: Any, data: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from psm.evaluation import subject

    calls = []
    original = subject.extract

    def spy(*arguments: Any, **more: Any) -> Any:
        calls.append(arguments)
        return original(*arguments, **more)

    monkeypatch.setattr(subject, "extract", spy)
    kinds = ["knn", "linear", "retrieval", "clusters", "rankme"]
    psm.evaluate(run, data=data, scores=kinds, linear={"epochs": 1}, out=str(tmp_path), progress=False)
    assert len(calls) == 2


def test_scores_are_a_function_of_the_seed(run: Any, data: Any, scores: Any, tmp_path: Path) -> None:
    torch.rand(7)  # nothing is drawn from the global generator
    again = psm.evaluate(run, data=data, scores=["clusters", "lidar"], out=str(tmp_path), **KEYS)
    first = {score.score: score.main.value for score in scores[0]}
    assert [score.main.value for score in again] == [first["clusters"], first["lidar"]]
