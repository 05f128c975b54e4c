"""Scores against slow references; the encoder is bit-identical afterwards; every score carries its protocol."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

import psm
from psm.config.schema import KnnConfig, LinearConfig, ViewsConfig
from psm.data import ImageDataset, ImageStore
from psm.evaluation.accuracy import topk_accuracy
from psm.evaluation.evaluate import BASELINE_LR_GRID
from psm.evaluation.features import extract, frozen
from psm.evaluation.knn import knn_accuracies, knn_accuracy, nearest_neighbors
from psm.evaluation.linear import linear_accuracy
from psm.models.pretrained import checksum
from psm.utils.errors import UserError
from psm.utils.files import append_line, read_lines
from psm.utils.seeding import generator
from psm.views.transform import Views


def clusters(count: Any = 60, width: Any = 5, classes: Any = 3, seed: Any = 0) -> Any:
    random = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % classes
    centers = torch.eye(width)[:classes] * 4
    return centers[labels] + torch.randn(count, width, generator=random), labels


def slow_knn(train: Any, train_labels: Any, test: Any, test_labels: Any, classes: Any, k: Any, temperature: Any) -> Any:
    right = five = 0
    for vector, label in zip(test, test_labels, strict=True):
        similarities = [float(torch.dot(vector, t) / (vector.norm() * t.norm())) for t in train]
        nearest = sorted(range(len(train)), key=lambda i: -similarities[i])[:k]
        votes = [0.0] * classes
        for i in nearest:
            votes[int(train_labels[i])] += math.exp(similarities[i] / temperature)
        order = sorted(range(classes), key=lambda c: -votes[c])
        right += order[0] == int(label)
        five += int(label) in order[:5]
    return 100 * right / len(test), 100 * five / len(test)


@pytest.mark.parametrize(("k", "temperature"), [(1, 0.1), (7, 0.1), (200, 0.5)])
def test_knn_equals_loops(k: Any, temperature: Any) -> None:
    train, train_labels = clusters(classes=7, width=8, count=84)
    test, test_labels = clusters(classes=7, width=8, count=35, seed=1)
    result = knn_accuracy(train, train_labels, test, test_labels, 7, KnnConfig(k=k, temperature=temperature))
    expected = slow_knn(train, train_labels, test, test_labels, 7, min(k, len(train)), temperature)
    assert (result.top1, result.top5) == pytest.approx(expected)


def test_one_search_serves_all_k_and_temperatures(monkeypatch: pytest.MonkeyPatch) -> None:
    train, train_labels = clusters(classes=7, width=8, count=84)
    test, test_labels = clusters(classes=7, width=8, count=35, seed=1)
    data = train, train_labels, test, test_labels, 7
    searches = []

    def spy(*arguments: Any) -> Any:
        searches.append(arguments)
        return nearest_neighbors(*arguments)

    monkeypatch.setattr("psm.evaluation.knn.nearest_neighbors", spy)
    found = knn_accuracies(*data, KnnConfig(k=[5, 200, 1], temperature=[0.07, 0.5]))
    assert len(searches) == 1
    assert [(k, t) for k, t, _ in found] == [(k, t) for k in (5, 84, 1) for t in (0.07, 0.5)]
    for k, temperature, accuracy in found:
        assert accuracy == knn_accuracy(*data, KnnConfig(k=k, temperature=temperature))


def test_neighbors_are_the_same_when_searched_block_by_block(monkeypatch: pytest.MonkeyPatch) -> None:
    train, test = clusters(count=84, width=8)[0], clusters(count=35, width=8, seed=1)[0]
    whole = nearest_neighbors(train, test, 20, torch.device("cpu"))
    monkeypatch.setattr("psm.evaluation.knn.TRAIN_BLOCK_BYTES", 11 * 8 * 4)  # fewer rows than neighbors
    monkeypatch.setattr("psm.evaluation.knn.MAX_SIMILARITIES", 40)
    blocks = nearest_neighbors(train, test, 20, torch.device("cpu"))
    assert torch.equal(whole[1], blocks[1])
    assert torch.allclose(whole[0], blocks[0])


def test_knn_is_finite_at_a_small_temperature() -> None:
    train, labels = clusters()
    assert knn_accuracy(train, labels, train, labels, 3, KnnConfig(k=1, temperature=1e-3)).top1 == 100


def test_accuracy() -> None:
    scores = torch.eye(8)[torch.arange(8)] + torch.eye(8)[(torch.arange(8) + 1) % 8] * 2
    result = topk_accuracy(scores, torch.arange(8))
    assert (result.top1, result.top5) == (0, 100)


def test_linear_learns_what_is_linear_and_nothing_else() -> None:
    train, labels = clusters(count=300)
    test, test_labels = clusters(count=90, seed=1)
    settings = LinearConfig(epochs=20, batch_size=32)
    assert linear_accuracy(lambda epoch: train, labels, test, test_labels, 3, settings).accuracy.top1 > 90
    # The scale and the offset of features do not matter, since they are standardized.
    moved = linear_accuracy(lambda epoch: train * 1e3 + 7, labels, test * 1e3 + 7, test_labels, 3, settings)
    assert moved.accuracy.top1 > 90
    shuffled = labels[torch.randperm(300, generator=torch.Generator().manual_seed(0))]
    assert linear_accuracy(lambda epoch: train, shuffled, test, test_labels, 3, settings).accuracy.top1 < 65


def test_linear_is_deterministic_and_asks_for_features_each_epoch() -> None:
    train, labels = clusters(count=60)
    epochs = []

    def features(epoch: Any) -> Any:
        epochs.append(epoch)
        return train

    first = linear_accuracy(features, labels, train, labels, 3, LinearConfig(epochs=4), seed=3)
    assert epochs == [0, 1, 2, 3]
    assert first == linear_accuracy(features, labels, train, labels, 3, LinearConfig(epochs=4), seed=3)


def slow_linear(train: Any, labels: Any, test: Any, test_labels: Any, lr: Any, epochs: Any, batch: Any) -> Any:
    """The linear protocol with one layer and torch's plain SGD."""
    mean, std = train.mean(0), train.std(0)
    layer = nn.Linear(train.shape[1], 3)
    with torch.no_grad():
        layer.weight.normal_(std=0.01, generator=generator(0, "linear"))
        layer.bias.zero_()
    optimizer = torch.optim.SGD(layer.parameters(), lr=lr, momentum=0.9)
    steps = epochs * -(-len(train) // batch)
    for epoch in range(epochs):
        order = torch.randperm(len(train), generator=generator(0, "linear", epoch))
        for place, rows in enumerate(order.split(batch)):
            step = epoch * -(-len(train) // batch) + place
            optimizer.param_groups[0]["lr"] = 0.5 * lr * (1 + math.cos(math.pi * step / steps))
            optimizer.zero_grad()
            nn.functional.cross_entropy(layer((train[rows] - mean) / std), labels[rows]).backward()
            optimizer.step()
    return topk_accuracy(layer((test - mean) / std), test_labels)


def noisy(count: Any, seed: Any) -> Any:
    """Two useful features among eighty of noise: a large learning rate overfits."""
    features, labels = clusters(count=count, width=80, seed=seed)
    features[:, :3] /= 3
    return features, labels


def test_a_grid_trains_each_rate_as_a_layer_of_its_own_and_takes_the_best() -> None:
    (train, labels), (test, test_labels) = noisy(120, 0), noisy(600, 1)
    settings = {"epochs": 30, "batch_size": 16}
    alone = {}
    for lr in (1.0, 0.1, 0.001):
        alone[lr] = linear_accuracy(lambda epoch: train, labels, test, test_labels, 3, LinearConfig(lr=lr, **settings))
        assert alone[lr].accuracy == slow_linear(train, labels, test, test_labels, lr, 30, 16)
        assert alone[lr].lr == lr
    grid = LinearConfig(lr_grid=list(alone), **settings)
    chosen = linear_accuracy(lambda epoch: train, labels, test, test_labels, 3, grid)
    assert chosen.accuracy == alone[chosen.lr].accuracy  # trained on all images, as if the rate had been given
    assert chosen.held_out_top1[chosen.lr] == max(chosen.held_out_top1.values())
    assert list(chosen.held_out_top1) == list(alone)
    assert chosen.accuracy.top1 == max(result.accuracy.top1 for result in alone.values())
    assert (
        linear_accuracy(lambda epoch: train, labels, test, test_labels, 3, LinearConfig(lr_grid=[0.1], **settings))
        == alone[0.1]
    )


def test_the_rate_is_chosen_without_the_test_images() -> None:
    train, labels = noisy(120, 0)
    settings = LinearConfig(epochs=5, lr_grid=[0.5, 0.001])
    chosen = {linear_accuracy(lambda epoch: train, labels, *noisy(60, seed), 3, settings).lr for seed in range(1, 5)}
    assert len(chosen) == 1


def test_extract_leaves_modes_and_buffers_alone() -> None:
    encoder = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Dropout(0.5))
    encoder[1].eval()
    encoder[3].train()
    before = {k: v.clone() for k, v in encoder.state_dict().items()}
    images = ImageStore(torch.randint(0, 255, (10, 3, 8, 8), dtype=torch.uint8))
    views = Views(ViewsConfig(), 8, (0.5,) * 3, (0.2,) * 3)
    features = extract(encoder, images, views, batch_size=4)
    assert [m.training for m in (encoder[1], encoder[3])] == [False, True]
    assert all(torch.equal(v, before[k]) for k, v in encoder.state_dict().items())
    with frozen(encoder), torch.no_grad():
        whole = encoder(views.plain(images.take(torch.arange(10))))
    assert torch.allclose(features, whole, atol=1e-5)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from helpers import SMALL

    out = tmp_path_factory.mktemp("runs") / "a"
    psm.pretrain(out, **SMALL)
    return out


FAST = {"linear": {"epochs": 3}, "progress": False}


def test_evaluate_a_run(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = []

    def spy(*arguments: Any) -> Any:
        loaded.append(psm.load_encoder(*arguments))
        return loaded[-1]

    monkeypatch.setattr("psm.evaluation.evaluate.load_encoder", spy)
    scores = psm.evaluate(run, baselines=True, out=str(tmp_path), **FAST)
    before = load_file(run / "encoder.safetensors")
    assert all(torch.equal(value, before[name]) for name, value in loaded[0].state_dict().items())
    assert [(s.of, s.score) for s in scores] == [
        (of, score) for of in ("raw pixels", "untrained encoder", "psm") for score in ("knn", "linear")
    ]
    stored = [json.loads(line) for line in (tmp_path / "scores.jsonl").read_text().splitlines()]
    assert len(stored) == 6
    for line in stored:
        protocol = line["protocol"]
        assert {
            "data",
            "train_images",
            "test_images",
            "epoch",
            "seed",
            "stem",
            "which",
            "images",
        } <= protocol.keys()
        assert (
            {"k", "temperature"} <= protocol.keys() if line["score"] == "knn" else {"epochs", "lr"} <= protocol.keys()
        )
        assert 0 <= line["top1"] <= line["top5"] <= 100
    assert stored[0]["protocol"]["epoch"] == 0
    assert stored[-1]["protocol"]["epoch"] == 2
    pixels, untrained, encoder = (line["protocol"] for line in stored if line["score"] == "linear")
    assert pixels["lr_grid"] == untrained["lr_grid"] == list(BASELINE_LR_GRID)
    assert pixels["lr"] in BASELINE_LR_GRID
    assert (encoder["lr"], encoder["lr_grid"]) == (0.1, None)


def test_one_grid_for_the_encoder_and_the_baselines(run: Any, tmp_path: Path) -> None:
    keys = {"linear": {"epochs": 2, "lr_grid": [0.2, 0.02]}, "knn": {"enabled": False}, "progress": False}
    scores = psm.evaluate(run, baselines=True, out=str(tmp_path), **keys)
    assert [score.of for score in scores] == ["raw pixels", "untrained encoder", "psm"]
    for score in scores:
        assert score.protocol["lr_grid"] == [0.2, 0.02]
        assert score.protocol["lr"] in (0.2, 0.02)


def rewritten(run: Any, path: Any, change: Any) -> Any:
    """A copy of the run's encoder file with its weights changed, and the checksum of the changed weights."""
    with safe_open(run / "encoder.safetensors", "pt") as file:
        description = json.loads(file.metadata()["psm"])
    state = load_file(run / "encoder.safetensors")
    change(state)
    save_file(state, path, {"psm": json.dumps(description | {"crc32": checksum(state)})})
    return path


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_weights_that_are_not_numbers_are_refused(run: Any, tmp_path: Path, value: Any) -> None:
    path = rewritten(run, tmp_path / "a.safetensors", lambda state: state["layer1.0.conv1.weight"].fill_(value))
    with pytest.raises(UserError, match=r"NaN or infinite \(layer1\.0\.conv1\.weight\)"):
        psm.evaluate(path, data="shapes", images={"limit": 100}, **FAST)
    assert [path.name for path in tmp_path.iterdir()] == ["a.safetensors"]


def test_features_that_are_not_numbers_are_refused(run: Any, tmp_path: Path) -> None:
    def overflow(state: Any) -> None:  # finite weights whose products are not
        state["conv1.weight"].fill_(3e38)

    path = rewritten(run, tmp_path / "a.safetensors", overflow)
    with pytest.raises(UserError, match="gives features that are NaN or infinite"):
        psm.evaluate(path, data="shapes", images={"limit": 100}, **FAST)
    assert not (tmp_path / "scores.jsonl").exists()


def test_a_run_its_checkpoint_and_its_encoder_score_the_same(run: Any, tmp_path: Path) -> None:
    files = run, run / "checkpoints" / "last.ckpt", run / "encoder.safetensors"
    results = [psm.evaluate(file, out=str(tmp_path), **FAST) for file in files]
    assert len({tuple((s.top1, s.top5) for s in scores) for scores in results}) == 1


def test_augmented_linear_sees_other_features(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def spy(*arguments: Any, **more: Any) -> Any:
        seen.append(extract(*arguments, **more))
        return seen[-1]

    monkeypatch.setattr("psm.evaluation.subject.extract", spy)
    scores = psm.evaluate(run, out=str(tmp_path), linear={"epochs": 2, "augment": True}, progress=False)
    assert scores[-1].protocol["augment"] is True
    plain, _, first, second = seen
    assert not torch.allclose(first, second)
    assert not torch.allclose(first, plain)


def test_refusals(run: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        psm.evaluate(tmp_path / "nothing")
    with pytest.raises(UserError, match="is it a run folder"):
        psm.evaluate(tmp_path)
    (tmp_path / "text.ckpt").write_text("hello")
    with pytest.raises(UserError):
        psm.evaluate(tmp_path / "text.ckpt")
    torch.save({"state_dict": {}}, tmp_path / "other.ckpt")
    with pytest.raises(UserError, match="not a checkpoint written by psm"):
        psm.evaluate(tmp_path / "other.ckpt")
    save_file({"a": torch.zeros(1)}, tmp_path / "other.safetensors")
    with pytest.raises(UserError, match="how to load"):
        psm.evaluate(tmp_path / "other.safetensors")
    blind = ImageDataset("blind", ImageStore(np.zeros((8, 3, 16, 16), np.uint8)), None, ())
    with pytest.raises(UserError, match="no labels"):
        psm.evaluate(run, data=blind)
    with pytest.raises(UserError, match=r"knn\.k=0"):
        psm.evaluate(run, knn={"k": 0})


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"accelerator": "gpus"}, "accelerator=gpus"),
        ({"precision": "foo"}, "precision=foo"),
        ({"linear": {"lr": -1.0}}, r"linear\.lr=-1"),
        ({"linear": {"lr_grid": [0.1, -1.0]}}, r"linear\.lr_grid=.*is too small"),
        ({"linear": {"lr_grid": []}}, r"linear\.lr_grid=\[\] leaves nothing"),
        ({"out": "/proc/nothing"}, "cannot be written"),
        ({"knn": {"temperature": float("nan")}}, r"knn\.temperature=nan"),
        ({"knn": {"k": [5, 0]}}, r"knn\.k=\[5,0\] is too small"),
        ({"knn": {"k": []}}, r"knn\.k=\[\] leaves nothing"),
        ({"scores": ["knn", "lines"]}, r"scores=\[knn,lines\] is unknown .*: choose one of all, knn, linear"),
        ({"scores": ["few_labels"], "few_labels": {"amounts": ["1/2"]}}, r"few_labels\.amounts=1/2 is no amount"),
        ({"scores": ["logistic"], "logistic": {"c_grid": [0.0]}}, r"logistic\.c_grid=.*above 0"),
        ({"knn": {"enabled": False}, "linear": {"enabled": False}}, "leave nothing to score"),
    ],
)
def test_bad_settings(run: Any, keys: Any, expected: Any) -> None:
    with pytest.raises(UserError, match=expected):
        psm.evaluate(run, **keys)


def test_snapshots_say_which_they_are(tmp_path: Path, small: dict[str, Any]) -> None:
    result = psm.pretrain(tmp_path / "a", **small, save={"snapshots": 1})
    scores = psm.evaluate(result.out / "checkpoints" / "epoch-0001.ckpt", **FAST)
    assert (scores[0].protocol["which"], scores[0].protocol["epoch"]) == ("epoch-0001", 1)


def test_a_torn_line_does_not_swallow_the_next(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"a": 1}\n{"a": 2')
    append_line(tmp_path / "a.jsonl", {"a": 3})
    assert read_lines(tmp_path / "a.jsonl") == [{"a": 1}, {"a": 3}]


class Hostile:
    def __init__(self, path: Any) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return open, (self.path, "w")


def test_a_hostile_checkpoint_is_refused_and_not_run(tmp_path: Path) -> None:
    torch.save({"psm": Hostile(str(tmp_path / "ran"))}, tmp_path / "evil.ckpt")
    with pytest.raises(UserError, match="not loaded"):
        psm.evaluate(tmp_path / "evil.ckpt")
    assert not (tmp_path / "ran").exists()


def test_a_missing_weight_is_an_error(run: Any, tmp_path: Path) -> None:
    rewritten(run, tmp_path / "a.safetensors", lambda state: state.pop("layer1.0.conv1.weight"))
    with pytest.raises(UserError, match=r"layer1\.0\.conv1\.weight"):
        psm.load_encoder(tmp_path / "a.safetensors")
