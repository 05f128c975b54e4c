"""Hugging Face datasets: saved to disk and as Parquet files, with and without labels and splits."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from psm.config.schema import ImagesConfig
from psm.data import decode, load_dataset
from psm.data.shard_writer import write_shards
from psm.utils.errors import UserError

datasets = pytest.importorskip("datasets")


def png(value: Any) -> Any:
    buffer = io.BytesIO()
    Image.new("RGB", (10, 8), (value, value, value)).save(buffer, "PNG")
    return buffer.getvalue()


def rows(count: Any, start: Any = 0, labels: Any = True) -> Any:
    content = {"image": [{"bytes": png(start + n), "path": None} for n in range(count)]}
    features = {"image": datasets.Image()}
    if labels:
        content["label"] = [n % 2 for n in range(count)]
        features["label"] = datasets.ClassLabel(names=["even", "odd"])
    return datasets.Dataset.from_dict(content, features=datasets.Features(features))


def read(source: Any, tmp_path: Any, **more: Any) -> Any:
    return load_dataset(f"hf:{source}", ImagesConfig(cache=str(tmp_path / "cache"), size=8, **more), progress=False)


def values(images: Any) -> Any:
    return images.take(torch.arange(len(images)))[:, 0, 0, 0].tolist()


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")


@pytest.mark.parametrize("kind", ["disk", "parquet file", "parquet folder"])
def test_one_split(tmp_path: Path, kind: Any) -> None:
    place = tmp_path / "set"
    if kind == "disk":
        rows(20).save_to_disk(str(place))
    else:
        place.mkdir()
        file = place / "train-00000-of-00001.parquet"
        rows(20).to_parquet(str(file))
        place = file if kind == "parquet file" else place
    data = read(place, tmp_path)
    assert data.classes == ("even", "odd")
    assert len(data.test) == 2
    assert sorted(values(data.train) + values(data.test)) == list(range(20))
    assert [value % 2 for value in values(data.train)] == data.train.labels.tolist()
    assert data.train.names[0] == f"train/{values(data.train)[0]}"


def test_splits_are_found_or_asked_for(tmp_path: Path) -> None:
    both = datasets.DatasetDict({"train": rows(12), "validation": rows(6, start=100), "extra": rows(4, start=200)})
    both.save_to_disk(str(tmp_path / "set"))
    data = read(tmp_path / "set", tmp_path)
    assert (values(data.train), values(data.test)) == ([*range(12)], [*range(100, 106)])
    extra = read(f"{tmp_path / 'set'}:extra", tmp_path, labels="none")
    assert (values(extra.train), extra.test, extra.classes) == ([200, 201, 202, 203], None, ())
    with pytest.raises(UserError, match=r"no split 'test'; give one of train, validation, extra"):
        read(f"{tmp_path / 'set'}:test", tmp_path)
    rows(4).save_to_disk(str(tmp_path / "one"))
    with pytest.raises(UserError, match="no split 'test', only train"):
        read(f"{tmp_path / 'one'}:test", tmp_path)


def test_limit_and_unreadable_rows(tmp_path: Path) -> None:
    spoiled = rows(20, labels=False).to_dict()
    spoiled["image"][3] = {"bytes": b"no image", "path": None}
    broken = datasets.Dataset.from_dict(spoiled, features=datasets.Features({"image": datasets.Image()}))
    broken.save_to_disk(str(tmp_path / "set"))
    data = read(tmp_path / "set", tmp_path)
    assert values(data.train) == [n for n in range(20) if n != 3]
    assert data.unreadable == (("train/3", "not an image of a known format"),)
    with pytest.raises(UserError, match="1 of 20 images"):
        read(tmp_path / "set", tmp_path, max_unreadable=0.01)
    assert len(read(tmp_path / "set", tmp_path, limit=5).train) == 5


def test_the_second_process_decodes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows(20).save_to_disk(str(tmp_path / "set"))
    config = ImagesConfig(cache=str(tmp_path / "cache"), size=8)
    first = load_dataset(f"hf:{tmp_path / 'set'}", config, progress=False, shared=True)
    monkeypatch.setattr(decode, "decode", None)
    second = load_dataset(f"hf:{tmp_path / 'set'}", config, progress=False, shared=True)
    assert np.array_equal(first.train._pixels, second.train._pixels)


def test_as_shards(tmp_path: Path) -> None:
    rows(20).save_to_disk(str(tmp_path / "set"))
    write_shards(f"hf:{tmp_path / 'set'}", str(tmp_path / "out" / "%06d.tar"), ImagesConfig(), 1e6)
    config = ImagesConfig(cache=str(tmp_path / "cache"), size=8)
    data = load_dataset(str(tmp_path / "out"), config, progress=False)
    assert data.classes == ("even", "odd")
    assert sorted(values(data.train) + values(data.test)) == list(range(20))


def test_what_is_no_dataset_of_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets.Dataset.from_dict({"text": ["a", "b"]}).save_to_disk(str(tmp_path / "text"))
    with pytest.raises(UserError, match=r"no column of images \(it has text\)"):
        read(tmp_path / "text", tmp_path)
    (tmp_path / "bad.parquet").write_text("no parquet")
    with pytest.raises(UserError, match="cannot be opened"):
        read(tmp_path / "bad.parquet", tmp_path)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="alone"):
        load_dataset(["hf:a", "hf:b"], ImagesConfig())
