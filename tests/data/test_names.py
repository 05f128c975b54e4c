"""Names of images: the files they come from, through limits, splits, unreadable files and the cache."""

import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from psm.config.schema import ImagesConfig
from psm.data import ImageStore, load_dataset
from psm.data.names import FileNames, PositionNames

MAPPED = 1e-9  # GB of memory: everything goes through the cache


def write_images(
    root: Any, splits: Any = ("",), kinds: Any = ("cat", "dog"), count: Any = 10, ending: Any = "png"
) -> None:
    """Images whose gray value is told by their name."""
    value = 0
    for split in splits:
        for kind in kinds:
            (root / split / kind).mkdir(parents=True)
            for number in range(count):
                Image.new("L", (32, 32), value).save(root / split / kind / f"{number:04}-{value}.{ending}")
                value += 1


def check_names(store: Any, prefixes: Any = "") -> Any:
    """Each image's name is that of its own file."""
    values = store.take(torch.arange(len(store)))[:, 0, 16, 16].tolist()
    names = [store.name(index) for index in range(len(store))]
    assert list(store.names) == names
    assert [int(name.rsplit("-", 1)[1].split(".")[0]) for name in names] == values
    assert all(name.startswith(prefixes) for name in names)
    return names


@pytest.mark.parametrize("memory", [4.0, MAPPED])
@pytest.mark.parametrize("limit", [None, 7])
def test_a_folder_keeps_its_file_names(tmp_path: Path, memory: Any, limit: Any) -> None:
    root = tmp_path / "photos"
    write_images(root)
    (root / "cat" / "0003-3.png").write_bytes(b"")
    (root / "dog" / "0009-19.png").write_text("hello")
    config = ImagesConfig(limit=limit, memory=memory, max_unreadable=0.5, cache=str(tmp_path / "cache"))
    for _ in range(2):  # built, then read from the cache
        data = load_dataset(str(root), config, progress=False)
        assert data.train.mapped == (memory == MAPPED)
        train, test = check_names(data.train, ("cat/", "dog/")), check_names(data.test, ("cat/", "dog/"))
        assert not set(train) & set(test)
        assert not {"cat/0003-3.png", "dog/0009-19.png"} & {*train, *test}
        assert limit is None or len(train) <= limit


def test_a_test_folder_keeps_its_own(tmp_path: Path) -> None:
    write_images(tmp_path, ("train", "test"), count=3)
    data = load_dataset(str(tmp_path), progress=False)
    assert check_names(data.train)[0] == "train/cat/0000-0.png"
    assert check_names(data.test)[0] == "test/cat/0000-6.png"


def test_tiny_imagenet_keeps_its_file_names(tmp_path: Path) -> None:
    write_images(tmp_path / "train", kinds=("n01/images", "n02/images"), ending="JPEG")
    (tmp_path / "wnids.txt").write_text("n01\nn02")
    data = load_dataset(str(tmp_path), progress=False)
    assert data.name == "tiny-imagenet"
    assert check_names(data.train)[0].startswith("train/n01/images/")
    assert len(check_names(data.test)) == 2


@pytest.mark.parametrize("limit", [None, 9])
def test_cifar_names_the_file_and_the_position_in_it(tmp_path: Path, limit: Any) -> None:
    rows = np.random.default_rng(0).integers(0, 10, (24, 3073), dtype=np.uint8)
    for number in range(5):
        rows[4 * number : 4 * number + 4].tofile(tmp_path / f"data_batch_{number + 1}.bin")
    rows[20:].tofile(tmp_path / "test_batch.bin")
    (tmp_path / "batches.meta.txt").write_text("\n".join("abcdefghij"))
    data = load_dataset(str(tmp_path), ImagesConfig(limit=limit), progress=False)
    for store in (data.train, data.test):
        for index, image in enumerate(store.take(torch.arange(len(store)))):
            file, position = store.name(index).split("/")
            stored = np.fromfile(tmp_path / file, dtype=np.uint8).reshape(-1, 3073)[int(position), 1:]
            assert np.array_equal(image.numpy().ravel(), stored)
    assert len(data.train.names) == (limit or 20)
    assert data.test.names[-1] == "test_batch.bin/3"


def test_images_without_files_have_numbers() -> None:
    shapes = load_dataset("shapes", ImagesConfig(limit=20, size=8), progress=False)
    memory = ImageStore(torch.zeros(3, 3, 4, 4, dtype=torch.uint8))
    for store in (shapes.train, shapes.test, memory):
        assert store.names is None
        assert store.name(2) == "image 2"


def test_names_must_match_the_images() -> None:
    with pytest.raises(ValueError, match="2 names for 3 images"):
        ImageStore(torch.zeros(3, 3, 4, 4, dtype=torch.uint8), names=["a", "b"])


def test_packed_names_are_a_sequence_of_their_paths() -> None:
    paths = ["a/1.png", "", "b/\u00fc\u4e2d.png", os.fsdecode(b"c/\xff.png")]
    names = FileNames(paths)
    assert (len(names), list(names), names[-1], names[1:3]) == (4, paths, paths[-1], paths[1:3])
    assert paths[2] in names
    with pytest.raises(IndexError):
        names[4]
    assert list(pickle.loads(pickle.dumps(names))) == paths
    assert len(FileNames([])) == 0
    store = ImageStore(torch.zeros(4, 3, 4, 4, dtype=torch.uint8), names=names)
    assert store.name(3) == "c/\\udcff.png"


def test_packed_names_take_little_memory() -> None:
    paths = [f"train/n{number % 1000:08}/{number:08}.JPEG" for number in range(10_000)]
    assert len(pickle.dumps(FileNames(paths))) < sum(map(len, paths)) + 5 * len(paths)


def test_positions_count_within_each_file() -> None:
    names = PositionNames(["a", "b", "c"], [2, 0, 3])
    assert list(names) == ["a/0", "a/1", "c/0", "c/1", "c/2"]
    assert (names[-1], names[1:3]) == ("c/2", ["a/1", "c/0"])
    assert list(PositionNames(["a", "b"], [2, 3], np.array([1, 2, 4]))) == ["a/1", "b/0", "b/2"]
    with pytest.raises(IndexError):
        names[5]
