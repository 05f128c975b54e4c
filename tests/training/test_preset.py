"""Presets decide what is not given, by the device unless one is named; what is given and what is stored wins."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import psm
from psm.config import merge as settings
from psm.config.presets import LAPTOP, PRETRAIN_PRESETS
from psm.config.schema import PretrainConfig
from psm.data import ImageDataset, ImageStore
from psm.training.preset import PresetChoice, choose_preset
from psm.utils.errors import UserError


def chosen(*overrides: dict[str, Any], images_given: bool = False) -> PresetChoice:
    return choose_preset(settings.build(PretrainConfig, *overrides), overrides, images_given)


@pytest.fixture(params=[False, True], ids=["cpu", "gpu"])
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: request.param)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    return request.param


def test_the_device_chooses_unless_a_name_does(gpu: bool) -> None:
    photos = {"data": "photos"}
    assert chosen(photos).name == ("paper" if gpu else "laptop")
    assert chosen(photos).reason == ("because there is a GPU" if gpu else "because no GPU was found")
    assert chosen(photos, {"preset": "auto"}) == chosen(photos)
    assert chosen(photos, {"accelerator": "cpu"}).name == "laptop"
    assert chosen(photos, {"accelerator": "gpu"}).name == "paper"
    for name, preset in PRETRAIN_PRESETS.items():
        assert chosen(photos, {"preset": name}) == PresetChoice(name, "as given", preset.settings)


@pytest.mark.parametrize(
    "given",
    [
        {"epochs": 3, "bank": {"size": 100}, "images": {"limit": None}},
        {"epochs": 3, "bank.size": 100, "images.limit": "none"},
    ],
)
def test_a_given_key_wins_even_where_it_says_nothing(given: dict[str, Any]) -> None:
    choice = chosen({"data": "photos", "preset": "laptop"}, given)
    assert choice.settings.keys() == {"encoder", "batch_size", "images.max_size"}
    config = settings.build(PretrainConfig, choice.settings, given)
    assert (config.epochs, config.bank, config.images.limit) == (3, {"size": 100}, None)
    assert (config.encoder, config.batch_size, config.images.max_size) == ("tiny", 64, 64)


def test_the_demo_is_as_its_file_says() -> None:
    """Every key that the preset has is in the file, or is about folders of images."""
    demo = settings.read_yaml(Path(__file__).parents[2] / "configs" / "demo.yaml")
    assert chosen(demo, {"preset": "laptop"}).settings == {}
    assert chosen(demo, {"preset": "laptop"}).lines(5000, 32) == []


def test_the_plan_says_what_was_decided_and_what_changes_it() -> None:
    choice = PresetChoice("laptop", "because no GPU was found", LAPTOP.settings)
    (line,) = choice.lines(images=3210, size=64)
    assert line == (
        "preset laptop, because no GPU was found: encoder=tiny, epochs=30, batch_size=64, bank.size=4096, "
        "images.max_size=64. Any key that is given wins; preset=paper is the paper's scale, for a GPU: resnet18, 200 "
        "epochs, batch 256."
    )
    assert "images.limit=10000" in choice.lines(images=10_000, size=32)[0]
    assert "images.max_size" not in choice.lines(images=10_000, size=32)[0]
    assert "preset=laptop is" in PresetChoice("paper", "because there is a GPU", {}).lines(50_000, 32)[0]


def noise(count: int) -> Tensor:
    return torch.randint(0, 256, (count, 3, 16, 16), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)


def test_a_run_keeps_its_preset(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is stored by name, does not change on resume, and a repetition by config.yaml has the same settings."""
    data = ImageDataset("mine", ImageStore(noise(70)), None, ())
    heads = {"hidden_dim": 8, "out_dim": 4}
    first = psm.pretrain(tmp_path / "a", data=data, epochs=1, preset="laptop", heads=heads, progress=False)
    assert "preset laptop, as given: encoder=tiny, batch_size=64, bank.size=4096. Any" in caplog.text
    config = first.config
    assert (config.preset, config.encoder, config.batch_size, config.bank["size"]) == ("laptop", "tiny", 64, 4096)
    assert config.images.limit is None  # images in memory are taken as they are
    for preset in ("auto", "laptop"):
        again = psm.pretrain(tmp_path / "a", data=data, resume=True, preset=preset, progress=False)
        assert settings.to_dict(again.config) == settings.to_dict(config)
    with pytest.raises(UserError, match="preset=paper differs from preset=laptop"):
        psm.pretrain(tmp_path / "a", data=data, resume=True, preset="paper", progress=False)
    stored = settings.read_yaml(tmp_path / "a" / "config.yaml")
    repeated = choose_preset(settings.build(PretrainConfig, stored), [stored])
    assert repeated == PresetChoice("laptop", "as given", {})
