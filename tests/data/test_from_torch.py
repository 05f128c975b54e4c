"""Map-style torch datasets as image stores: every kind of item, and what is refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset, IterableDataset, TensorDataset

import psm
from psm.config.schema import ImagesConfig
from psm.data.from_torch import from_torch
from psm.utils.errors import UserError


class Items(Dataset):
    """A dataset of given items."""

    def __init__(self, *items: Any) -> None:
        self.items = items
        self.reads = []

    def __len__(self) -> Any:
        return len(self.items)

    def __getitem__(self, index: Any) -> Any:
        self.reads.append(index)
        return self.items[index]


SQUARE = np.random.default_rng(0).integers(0, 256, (16, 16, 3), dtype=np.uint8)
STORED = SQUARE.transpose(2, 0, 1)


def load(*items: Any, **images: Any) -> Any:
    return from_torch(Items(*items), ImagesConfig(**{"size": 16, **images}), progress=False)


@pytest.mark.parametrize(
    "item",
    [
        SQUARE,
        STORED,
        Image.fromarray(SQUARE),
        torch.from_numpy(STORED.copy()),
        torch.from_numpy(STORED / 255).float(),
        STORED.astype(np.float32) / 255,
        Image.fromarray(SQUARE).convert("RGBA"),
    ],
    ids=["array", "channels first", "PIL", "tensor", "float tensor", "float array", "RGBA"],
)
@pytest.mark.parametrize("labeled", [False, True])
def test_every_kind_of_image_gives_the_same_pixels(item: Any, labeled: Any) -> None:
    data = load(*[(item, 0)] * 3 if labeled else [item] * 3)
    assert data.name == "Items"
    assert np.array_equal(data.train.take(torch.arange(3)), np.stack([STORED] * 3))


@pytest.mark.parametrize(
    "item", [SQUARE[:, :, 0], SQUARE[:, :, :1], torch.from_numpy(STORED[:1].copy()), Image.fromarray(SQUARE[:, :, 0])]
)
def test_gray_images_become_three_equal_channels(item: Any) -> None:
    stored = load(item, item).train.take(torch.tensor([0]))[0].numpy()
    assert np.array_equal(stored, np.stack([SQUARE[:, :, 0]] * 3))


def test_images_are_cropped_to_the_center_and_resized_as_folders_are(tmp_path: Path) -> None:
    wide = np.random.default_rng(1).integers(0, 256, (40, 60, 3), dtype=np.uint8)
    for number in range(2):
        Image.fromarray(wide).save(tmp_path / f"{number}.png")
    config = ImagesConfig(size=24)
    folder = psm.data.load_dataset(str(tmp_path), config, progress=False)
    ours = from_torch(Items(wide, wide), config, progress=False)
    assert torch.equal(ours.train.take(torch.arange(2)), folder.train.take(torch.arange(2)))
    assert from_torch(Items(wide, wide), progress=False).size == 40


def test_each_item_is_read_once_where_the_size_is_given() -> None:
    items = Items(*[SQUARE] * 5)
    from_torch(items, ImagesConfig(size=16), progress=False)
    assert items.reads == [0, 1, 2, 3, 4]
    items.reads.clear()
    assert len(from_torch(items, ImagesConfig(size=16, limit=3), progress=False).train) == 3
    assert len(items.reads) == 3


@pytest.mark.parametrize("kind", [int, np.int64, torch.tensor])
def test_labels_are_kept_and_a_share_held_out(kind: Any) -> None:
    items = Items(*[(np.full((16, 16, 3), i % 2, np.uint8), kind(i % 2)) for i in range(20)])
    items.classes = ["cat", "dog"]
    data = from_torch(items, ImagesConfig(size=16), progress=False)
    assert data.classes == ("cat", "dog")
    assert (len(data.train), len(data.test)) == (18, 2)
    for part in (data.train, data.test):
        pixels = part.take(torch.arange(len(part)))[:, 0, 0, 0].long()
        assert torch.equal(pixels, part.labels)
    del items.classes
    assert from_torch(items, ImagesConfig(size=16), progress=False).classes == ("0", "1")
    assert from_torch(items, ImagesConfig(size=16, labels="none"), progress=False).train.labels is None


@pytest.mark.parametrize("label", ["cat", 0.5, -1, True, torch.zeros(3), {"box": 1}])
def test_labels_that_are_no_classes_are_left_out(caplog: pytest.LogCaptureFixture, label: Any) -> None:
    data = load((SQUARE, label), (SQUARE, label))
    assert data.train.labels is None
    assert "Items is taken as unlabeled: its labels are not whole numbers" in caplog.text


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        yield SQUARE


class Unsized(Dataset):
    def __getitem__(self, index: Any) -> Any:
        return SQUARE


class Failing(Dataset):
    def __len__(self) -> Any:
        return 3

    def __getitem__(self, index: Any) -> None:
        raise OSError("disk on fire")


@pytest.mark.parametrize(
    ("dataset", "says"),
    [
        (Stream(), "Stream can only be iterated: give a map-style dataset"),
        (Unsized(), "Unsized has no length"),
        (Items(), "Items is empty"),
        (Failing(), "Failing: item 0 raises OSError: disk on fire"),
        (Items("text"), "item 0 is a str, no image"),
        (Items((SQUARE, 0, 1)), "item 0 is a tuple of 3"),
        (Items({"image": SQUARE}), "item 0 is a dict, no image"),
        (Items(SQUARE, (SQUARE, 0)), "item 1 is a pair with an array, where others are an array"),
        (Items(SQUARE, torch.zeros(3, 16, 16)), "item 1 is a tensor, where others are an array"),
        (Items(torch.zeros(16)), r"item 0 is of shape \(16,\)"),
        (Items(torch.zeros(16, 16, 3)), r"item 0 is of shape \(16, 16, 3\)"),
        (Items(torch.zeros(2, 16, 16)), r"item 0 is of shape \(2, 16, 16\)"),
        (Items(torch.zeros(3, 0, 0)), r"item 0 is of shape \(3, 0, 0\)"),
        (Items(torch.full((3, 16, 16), -1.5)), "float values from -1.5 to -1.5, .* leave out Normalize"),
        (Items(torch.full((3, 16, 16), torch.nan)), "float values from nan"),
        (Items(torch.zeros(3, 16, 16, dtype=torch.int64)), "of type int64: give uint8"),
    ],
)
def test_what_is_no_dataset_of_images_is_refused(dataset: Any, says: str) -> None:
    with pytest.raises(UserError, match=says):
        from_torch(dataset, ImagesConfig(size=16), progress=False)


def test_more_than_memory_is_refused_before_it_is_read() -> None:
    items = Items(*[SQUARE] * 5)
    with pytest.raises(UserError, match=r"needs 0\.0 GB in memory at 16 pixels, more than images\.memory=1e-06"):
        from_torch(items, ImagesConfig(size=16, memory=1e-6), progress=False)
    assert items.reads == []


def test_a_torch_dataset_trains_resumes_and_is_scored(tmp_path: Path, small: dict[str, Any]) -> None:
    """As the same images given as a tensor do, where there are no labels to hold out for."""
    del small["data"]
    pixels = torch.randint(0, 256, (64, 3, 16, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    small["epochs"] = 1
    plain = psm.pretrain(tmp_path / "plain", data=pixels, **small)
    ours = psm.pretrain(tmp_path / "ours", data=Items(*pixels), **small)
    for name, value in plain.encoder.state_dict().items():
        assert torch.equal(value, ours.encoder.state_dict()[name]), name
    assert ours.config.data == "Items"
    assert len(psm.pretrain(tmp_path / "ours", data=Items(*pixels), resume=True, progress=False).metrics) == 1
    pairs = TensorDataset(pixels, torch.arange(64) % 4)
    (score,) = psm.evaluate(ours.out, data=pairs, linear={"enabled": False}, progress=False)
    assert score.protocol["data"] == "TensorDataset"
    assert score.protocol["classes"] == 4
