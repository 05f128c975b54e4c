"""Training on shards: resume bit for bit, evaluation, and what the run is told of unreadable images."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import psm
from psm.config.schema import ImagesConfig
from psm.data.shard_writer import write_shards
from psm.training.module import PretrainModule
from psm.utils.errors import UserError


class Interruption(Exception):
    pass


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("shards")
    config = ImagesConfig(limit=100, size=24)
    write_shards("shapes", str(folder / "%06d.tar"), config, 30_000)
    for file in sorted(folder.glob("test-*.tar"))[2:]:  # a few test images are enough
        file.unlink()
    return folder


def weights(result: Any) -> Any:
    return torch.cat([value.flatten().float() for value in result.encoder.state_dict().values()])


def test_a_resumed_run_on_shards_equals_an_uninterrupted_one(
    tmp_path: Path, small: Any, shards: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    small |= {"data": str(shards), "save": {"every_steps": 1}, "views": {"size": 16}}
    small["images"] = {"size": 24, "window": 2, "cache": str(tmp_path / "cache"), "workers": 0}
    whole = psm.pretrain(tmp_path / "whole", **small)
    step, stops = PretrainModule.training_step, [1, 2, 4]

    def training_step(self: Any, batch: Any, index: Any) -> Any:
        if stops and batch.step == stops[0]:
            stops.pop(0)
            raise Interruption
        return step(self, batch, index)

    monkeypatch.setattr(PretrainModule, "training_step", training_step)
    for _ in range(3):
        with pytest.raises(Interruption):
            psm.pretrain(tmp_path / "parts", **small, resume="auto")
    # Another number of worker processes changes nothing.
    parts = psm.pretrain(tmp_path / "parts", resume=True, progress=False, images={"workers": 1})
    assert torch.equal(weights(whole), weights(parts))
    assert [record["loss"] for record in whole.metrics] == [record["loss"] for record in parts.metrics]
    assert all("knn" in record for record in whole.metrics)
    scores = psm.evaluate(tmp_path / "whole", linear={"enabled": False}, progress=False)
    assert scores[0].protocol["data"] == str(shards)
    assert scores[0].protocol["train_images"] == 100


def test_several_sources_are_stored_with_the_run(tmp_path: Path, small: Any) -> None:
    """A list given as data= is in config.yaml, and the run is resumed and scored from there."""
    random = np.random.default_rng(0)
    for number in range(60):
        path = tmp_path / ("a" if number < 30 else "b") / ("cat" if number % 2 else "dog") / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(random.integers(0, 256, (16, 16, 3), dtype=np.uint8)).save(path)
    del small["data"]
    result = psm.pretrain(tmp_path / "run", data=[tmp_path / "a", tmp_path / "b"], **small | {"epochs": 1})
    assert result.config.data == [str(tmp_path / "a"), str(tmp_path / "b")]
    again = psm.pretrain(tmp_path / "run", resume=True, progress=False)
    assert list(again.data.train.names) == list(result.data.train.names)
    (score,) = psm.evaluate(tmp_path / "run", linear={"enabled": False}, progress=False)
    assert score.protocol["data"] == result.config.data
    assert score.protocol["classes"] == 2
    with pytest.raises(UserError, match=r"data=\[.*\] is not what the run .* began with: it holds \d+ training"):
        psm.pretrain(tmp_path / "run", data=[tmp_path / "a"], resume=True, progress=False)


def test_whole_images_train(tmp_path: Path, small: Any) -> None:
    random = np.random.default_rng(0)
    (tmp_path / "photos").mkdir()
    for number in range(40):
        pixels = random.integers(0, 256, (20 + number % 7, 30, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / "photos" / f"{number}.png")
    small |= {"data": str(tmp_path / "photos"), "epochs": 1}
    small["images"] = {"size": 16, "whole": True, "cache": str(tmp_path / "cache"), "workers": 1}
    whole = psm.pretrain(tmp_path / "whole", **small)
    assert whole.metrics[-1]["step"] == 1
    assert whole.data.train.streamed.whole(0).shape == (20, 30, 3)
