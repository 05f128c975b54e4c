"""Fine-tuning: the run folder, resume bit for bit, what trains and what does not, and sentences for wrong input."""

import json
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping
from torch import nn

import psm
from helpers import SMALL as PRETRAINING
from helpers import run_psm, save_images, save_untrained_encoder
from psm.config.finetune import FinetuneConfig
from psm.config.schema import ImagesConfig
from psm.data import ImageDataset, ImageStore, load_dataset
from psm.finetuning.layers import layer_scales
from psm.finetuning.module import FinetuneModule
from psm.finetuning.resolve import resolve, split_validation
from psm.models.factory import create_encoder
from psm.models.init_weights import read_initial_weights
from psm.reporting.run_page import write_page
from psm.utils.checkpoint_file import read_checkpoint
from psm.utils.errors import UserError

SMALL = {"epochs": 3, "batch_size": 32, "optim": {"lr": 0.01}, "progress": False}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return save_untrained_encoder(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def data() -> ImageDataset:
    found = load_dataset("shapes", ImagesConfig(limit=100, size=16), progress=False)
    assert found.test is not None
    return ImageDataset("shapes", found.train, found.test.select(torch.arange(60)), found.classes)


def finetune(run: Any, data: Any, out: Any, **keys: Any) -> Any:
    return psm.finetune(run, data, out, **{**SMALL, **keys})


def test_the_run_folder_has_the_best_and_the_last_classifier(tmp_path: Path, run: Any, data: ImageDataset) -> None:
    result = finetune(run, data, tmp_path / "clf")
    assert [m["epoch"] for m in result.metrics] == [1, 2, 3]
    assert result.metrics[0].keys() >= {"loss", "train_accuracy", "validation", "validation_loss", "lr"}
    best = max(result.metrics, key=lambda m: (m["validation"], -m["validation_loss"]))
    assert (result.best.epoch, result.last.epoch) == (best["epoch"], 3)
    assert result.best.validation.top1 == pytest.approx(best["validation"])
    assert (result.best.validation.images, result.best.test.images) == (10, 60)
    low, high = result.best.test.interval
    assert low < result.best.test.top1 < high
    assert sum(map(sum, result.best.test.matrix)) == 60
    for name, scores in (("classifier.safetensors", result.best), ("classifier-last.safetensors", result.last)):
        loaded = psm.load_classifier(tmp_path / "clf" / name)
        assert (loaded.info.temperature, loaded.info.encoder.epoch) == (scores.temperature, scores.epoch)
        inputs = result.views.plain(data.test.take(torch.arange(60)))
        with torch.inference_mode():
            right = (loaded(inputs).argmax(1) == data.test.labels).double().mean().item()
        assert 100 * right == pytest.approx(scores.test.top1)
    # The encoder of the classifier is an encoder like any other.
    assert psm.load_encoder(tmp_path / "clf").info.method == "psm, fine-tuned"
    assert psm.load_encoder(tmp_path / "clf/checkpoints/last.ckpt").info.epoch == 3
    page = write_page(tmp_path / "clf", data).read_text()
    assert f"{result.best.test.top1:.2f}" in page
    table = page.partition("What is taken for what")[2].partition("</table>")[0]
    assert all(table.count(f">{name}</") == 2 for name in data.classes), "not each row and column has its whole name"
    assert page.count("<svg") == 4
    assert json.loads((tmp_path / "clf/finetune.json").read_text())["best"]["epoch"] == result.best.epoch


class Interrupt(lightning.Callback):
    """Ctrl-C after so many steps."""

    def __init__(self, step: int):
        self.step = step

    def on_train_batch_end(self, trainer: lightning.Trainer, *_: Any) -> None:
        if trainer.global_step == self.step:
            raise KeyboardInterrupt


@pytest.mark.parametrize("keys", [{}, {"head_only": True, "views": {"enabled": False}}])
def test_interrupted_and_resumed_ends_with_the_same_bits(
    tmp_path: Path, run: Any, data: ImageDataset, keys: dict[str, Any]
) -> None:
    whole = finetune(run, data, tmp_path / "whole", **keys)
    start, cut = save_untrained_encoder(tmp_path / "start"), {**keys, "save": {"every_steps": 1}}
    with pytest.raises(KeyboardInterrupt):
        finetune(start, data, tmp_path / "cut", **cut, callbacks=Interrupt(5))
    (start / "encoder.safetensors").unlink()  # a run that goes on does not need what it began with
    with pytest.raises(UserError, match="seed=1 differs from seed=0"):
        finetune(start, data, tmp_path / "cut", **cut, resume="true", seed=1)
    resumed = finetune(start, data, tmp_path / "cut", **cut, resume="true")
    assert resumed.best == whole.best
    for part in ("encoder", "head"):
        states = [getattr(x.classifier, part).state_dict() for x in (whole, resumed)]
        assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())
    assert [m["loss"] for m in resumed.metrics] == [m["loss"] for m in whole.metrics]


def test_other_labels_are_other_data(tmp_path: Path, run: Any, data: ImageDataset) -> None:
    with pytest.raises(KeyboardInterrupt):
        finetune(run, data, tmp_path / "a", validation=0, save={"every_steps": 1}, callbacks=Interrupt(2))
    swapped = data.train.select(torch.arange(len(data.train)))
    swapped.labels = data.train.labels.clone()
    first, second = ((data.train.labels == label).nonzero()[0] for label in (0, 1))
    swapped.labels[first], swapped.labels[second] = 1, 0
    other = ImageDataset("shapes", swapped, data.test, data.classes)
    with pytest.raises(UserError, match="some of its images have other labels"):
        finetune(run, other, tmp_path / "a", validation=0, save={"every_steps": 1}, resume="true")


def test_the_head_alone_leaves_the_encoder_as_it_was(tmp_path: Path, run: Any, data: ImageDataset) -> None:
    result = finetune(run, data, tmp_path / "a", head_only=True, epochs=1)
    before, after = (psm.load_encoder(path).state_dict() for path in (run, tmp_path / "a"))
    assert all(torch.equal(value, before[name]) for name, value in after.items())
    assert result.config.optim.weight_decay == 0


def test_features_computed_once_train_the_same_head(
    tmp_path: Path, run: Any, data: ImageDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = {"head_only": True, "views": {"enabled": False}}
    cached = finetune(run, data, tmp_path / "a", **keys)
    monkeypatch.setattr(FinetuneModule, "caches_features", False)
    anew = finetune(run, data, tmp_path / "b", **keys)
    assert torch.allclose(cached.classifier.head.weight, anew.classifier.head.weight, atol=1e-4)
    assert [m["validation"] for m in cached.metrics] == [m["validation"] for m in anew.metrics]


def test_validation_images_are_a_part_of_every_class_and_train_nothing(data: ImageDataset) -> None:
    parts = split_validation(data.train, 0.25)
    assert parts.validation is not None
    train, held = (x.take(torch.arange(len(x))).flatten(1) for x in (parts.train, parts.validation))
    assert len(train) + len(held) == len(data.train)
    assert not (train[:, None] == held[None]).all(2).any()
    assert parts.validation.labels.bincount().tolist() == [2] * 10  # a quarter of ten images, rounded to even
    single = ImageStore(data.train.take(torch.arange(3)), torch.tensor([0, 1, 2]))
    assert split_validation(single, 0.25).validation is None


def test_precision_is_chosen_by_the_device_as_in_pretraining(
    data: ImageDataset, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: True)
    info = psm.load_encoder(run).info
    for config, precision in (
        (FinetuneConfig(data="shapes"), "bf16-mixed"),
        (FinetuneConfig(data="shapes", accelerator="cpu"), "32-true"),
        (FinetuneConfig(data="shapes", precision="16-mixed"), "16-mixed"),
    ):
        assert resolve(config, data, info).precision == precision


def test_without_validation_the_last_epoch_is_kept(tmp_path: Path, run: Any, data: ImageDataset) -> None:
    result = finetune(run, data, tmp_path / "a", validation=0, epochs=2)
    assert result.best == result.last
    assert result.best.temperature is None
    assert not (tmp_path / "a/classifier-last.safetensors").exists()
    assert psm.load_classifier(tmp_path / "a").info.temperature == 1.0


def test_from_scratch_it_learns_and_is_not_taken_for_a_pretraining(tmp_path: Path, data: ImageDataset) -> None:
    keys = {**SMALL, "epochs": 6, "optim": {"lr": 0.05}, "validation": 0}
    result = psm.finetune(None, data, tmp_path / "a", encoder="tiny", **keys)
    assert result.metrics[-1]["loss"] < result.metrics[0]["loss"] - 0.2
    assert psm.load_encoder(tmp_path / "a").info.method == "from scratch"
    with pytest.raises(UserError, match=r"a run of `psm finetune`, and one of `psm pretrain` is needed"):
        psm.pretrain(tmp_path / "a", resume="true", progress=False)
    with pytest.raises(UserError, match="a run of `psm finetune`"):
        psm.inspect(tmp_path / "a")


def test_the_learning_rate_falls_from_the_head_to_the_stem(tmp_path: Path, run: Any, data: ImageDataset) -> None:
    encoder = create_encoder("resnet18", image_size=32)
    scales = {name: layer_scales(encoder, 0.5)[p] for name, p in encoder.named_parameters()}
    assert scales["layer4.1.conv2.weight"] == 0.5
    assert scales["layer1.0.bn1.bias"] == 0.5**4
    assert scales["conv1.weight"] == scales["bn1.weight"] == 0.5**5

    class Transformer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.patch_embed = nn.Linear(2, 2)
            self.blocks = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))
            self.norm = nn.LayerNorm(2)

    network = Transformer()
    depth = [layer_scales(network, 0.1)[p] for name, p in network.named_parameters() if "weight" in name]
    assert depth == pytest.approx([1e-4, 1e-3, 1e-2, 1e-1, 1e-1])
    finetune(run, data, tmp_path / "a", layer_decay=0.5, epochs=1, validation=0)
    groups = read_checkpoint(tmp_path / "a/checkpoints/last.ckpt")["optimizer_states"][0]["param_groups"]
    assert sorted(group.get("lr_factor", 1.0) for group in groups) == [0.5**power for power in (5, 4, 3, 2, 1, 0)]


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"checkpoint": ""}, "checkpoint= is missing"),
        ({"checkpoint": "nowhere"}, "checkpoint=nowhere does not exist"),
        ({"encoder": "resnet18"}, "is not the encoder of checkpoint="),
        ({"checkpoint": None}, "give encoder= too"),
        ({"checkpoint": None, "encoder": "tiny", "head_only": True}, "give the checkpoint of a trained one"),
        ({"head_only": True, "layer_decay": 0.5}, "head_only=true trains none"),
        ({"stem": "imagenet"}, "is not the stem"),
        ({"epochs": 0}, "epochs=0 is too small"),
        ({"callbacks": EarlyStopping("knn")}, "which this run does not measure"),
    ],
)
def test_wrong_settings_are_answered_in_a_sentence(
    tmp_path: Path, run: Any, data: ImageDataset, keys: dict[str, Any], says: str
) -> None:
    given = {"checkpoint": run, **keys}
    with pytest.raises(UserError, match=says):
        finetune(given.pop("checkpoint"), data, tmp_path / "a", **given)
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("overwrite", ["true", "delete"])
def test_the_weights_to_start_from_are_not_overwritten(tmp_path: Path, data: ImageDataset, overwrite: str) -> None:
    run = save_untrained_encoder(tmp_path / "a")
    kept = (run / "encoder.safetensors").read_bytes()
    (run / ".psm").touch()
    with pytest.raises(UserError, match=r"lies in out=.*: name another out"):
        finetune(run, data, run, overwrite=overwrite)
    assert (run / "encoder.safetensors").read_bytes() == kept


def test_further_pretraining_starts_from_the_best_encoder(tmp_path: Path, run: Any, data: ImageDataset) -> None:
    result = finetune(run, data, tmp_path / "clf", epochs=2)
    best = result.classifier.encoder.state_dict()
    weights = read_initial_weights(tmp_path / "clf")
    assert all(torch.equal(weights.state[name], value) for name, value in best.items())
    # Of the checkpoint the weights alone: its settings are none of psm pretrain.
    for source in (tmp_path / "clf", tmp_path / "clf/checkpoints/last.ckpt"):
        assert read_initial_weights(source).settings is None
    keys = {**PRETRAINING, "epochs": 1, "init": str(tmp_path / "clf/checkpoints/last.ckpt")}
    assert psm.pretrain(tmp_path / "b", **keys).encoder is not None


def test_images_without_labels_are_refused(tmp_path: Path, run: Any) -> None:
    flat = save_images(tmp_path / "flat", ["a.png", "b.png", "c.png"])
    with pytest.raises(UserError, match="has no labels to learn"):
        finetune(run, flat, tmp_path / "a")
    assert not (tmp_path / "a").exists()


def test_the_command_line_trains_predicts_and_says_what_comes_next(tmp_path: Path, run: Any) -> None:
    names = [f"{kind}/{index}.png" for kind in ("ant", "bee", "cat") for index in range(10)]
    folder, clf, out = save_images(tmp_path / "images", names), tmp_path / "clf", tmp_path / "labels.csv"
    trained = run_psm("finetune", f"checkpoint={run}", f"data={folder}", f"out={clf}", "epochs=2", "batch_size=8")
    assert trained.returncode == 0, trained.stderr
    assert f"fine-tuning {run} with tiny" in trained.stderr
    assert f"predict:    psm predict checkpoint={clf}" in trained.stdout
    assert "95 % interval" in trained.stdout
    assert "calibrated: temperature" in trained.stdout
    assert (clf / "report.html").exists()
    found = run_psm("predict", clf, f"data={folder}", f"out={out}")
    assert found.returncode == 0, found.stderr
    assert "% of 30 labeled images" in found.stdout
    assert "its own training images are among them" in found.stdout
    assert len(out.read_text().splitlines()) == 31
    again = run_psm("predict", clf, f"data={folder}", f"out={out}")
    assert again.returncode == 2
    assert "exists: give overwrite=true" in again.stderr
