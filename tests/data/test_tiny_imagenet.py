"""Tiny ImageNet in its published layout, small."""

from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from psm.config.schema import ImagesConfig
from psm.data import load_dataset
from psm.utils.errors import UserError

WNIDS = ("n01", "n02", "n03")


@pytest.fixture
def root(tmp_path: Path) -> Any:
    """Three classes of 20 training images, each with its own gray value, and two val images a class."""
    place = tmp_path / "tiny-imagenet-200"
    rows = []
    for label, wnid in enumerate(WNIDS):
        (place / "train" / wnid / "images").mkdir(parents=True)
        (place / "train" / wnid / f"{wnid}_boxes.txt").write_text("a box\n")
        for number in range(20):
            Image.new("L", (64, 64), 60 * label + number).save(
                place / "train" / wnid / "images" / f"{wnid}_{number}.JPEG"
            )
        rows += [(f"val_{2 * label + k}.JPEG", wnid) for k in range(2)]
    (place / "val" / "images").mkdir(parents=True)
    for number, (name, _) in enumerate(rows):
        Image.new("RGB", (64, 64), (200 + number,) * 3).save(place / "val" / "images" / name)
    annotations = [f"{name}\t{wnid}\t0\t0\t9\t9" for name, wnid in reversed(rows)]
    (place / "val" / "val_annotations.txt").write_text("\n".join(annotations) + "\n")
    (place / "wnids.txt").write_text("\n".join(reversed(WNIDS)))
    (place / "words.txt").write_text("n01\tkoala, koala bear\nn02\tbrain coral\nn99\tunused\n")
    return tmp_path


def read(root: Any, **settings: Any) -> Any:
    return load_dataset("tiny-imagenet", ImagesConfig(root=str(root), download=False, **settings), progress=False)


def values(images: Any) -> Any:
    return images.take(torch.arange(len(images)))[:, 0, 30, 30].tolist()


def test_the_paper_split_takes_a_tenth_of_every_class(root: Any) -> None:
    data = read(root)
    assert data.classes == ("koala", "brain coral", "n03")
    assert torch.bincount(data.train.labels).tolist() == [18] * 3
    assert torch.bincount(data.test.labels).tolist() == [2] * 3
    for part in (data.train, data.test):
        assert part.labels.tolist() == [value // 60 for value in values(part)]
    assert sorted(values(data.train) + values(data.test)) == [60 * label + k for label in range(3) for k in range(20)]
    assert values(read(root).test) == values(data.test)
    assert (data.size, read(root, size=32).size) == (64, 32)


def test_the_official_split_reads_the_annotations(root: Any) -> None:
    data = read(root, split="official")
    assert (len(data.train), values(data.test)) == (60, [200, 201, 202, 203, 204, 205])
    assert data.test.labels.tolist() == [0, 0, 1, 1, 2, 2]


def test_the_folder_itself_as_root_and_as_a_path(root: Any) -> None:
    place = root / "tiny-imagenet-200"
    for data in (read(place), load_dataset(str(place), progress=False), load_dataset(str(root), progress=False)):
        assert (data.name, data.classes[0], len(data.train)) == ("tiny-imagenet", "koala", 54)


def test_a_subset_of_the_classes(root: Any) -> None:
    folder = root / "tiny-imagenet-200" / "train" / "n02"
    for file in sorted(folder.rglob("*"), reverse=True):
        file.rmdir() if file.is_dir() else file.unlink()
    folder.rmdir()
    data = read(root, split="official")
    assert data.classes == ("koala", "n03")
    assert values(data.test) == [200, 201, 204, 205]
    assert data.test.labels.tolist() == [0, 0, 1, 1]


def test_missing_annotations(root: Any) -> None:
    (root / "tiny-imagenet-200" / "val" / "val_annotations.txt").unlink()
    assert len(read(root).test) == 6
    with pytest.raises(UserError, match=r"split=official needs .*val_annotations.txt"):
        read(root, split="official")


def test_limit(root: Any) -> None:
    data = read(root, limit=7)
    assert sorted(torch.bincount(data.train.labels).tolist()) == [2, 2, 3]
    assert len(data.test) == 6
