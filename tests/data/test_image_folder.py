"""Folders of images: layouts, labels, sizes, unreadable files, and odd file systems."""

import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from psm.config.schema import ImagesConfig
from psm.data import decode, image_folder, load_dataset
from psm.utils.errors import UserError


def paint(path: Any, value: Any = 0, size: Any = (32, 32)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, (value, value, value)).save(path)


def values(images: Any) -> Any:
    """One gray value an image, which tells the tests which file it is."""
    return images.take(torch.arange(len(images)))[:, 0, 0, 0].tolist()


def read(root: Any, **settings: Any) -> Any:
    return load_dataset(str(root), ImagesConfig(**settings), progress=False)


def test_a_flat_folder_is_unlabeled_and_trains_whole(tmp_path: Path) -> None:
    for number in (3, 1, 2):
        paint(tmp_path / f"{number}.png", number)
    data = read(tmp_path)
    assert values(data.train) == [1, 2, 3]
    assert (data.test, data.classes, data.labeled, data.train.labels) == (None, (), False, None)
    assert data.name == tmp_path.name


def test_class_folders_hold_out_a_share_of_each(tmp_path: Path) -> None:
    for label, name in enumerate(("cat", "dog")):
        for number in range(20):
            paint(tmp_path / name / "deeper" / f"{number:02}.png", 100 * label + number)
    data = read(tmp_path, test_share=0.25)
    assert data.classes == ("cat", "dog")
    assert sorted(values(data.train) + values(data.test)) == [*range(20), *range(100, 120)]
    assert data.train.labels.tolist() == [value // 100 for value in values(data.train)]
    assert data.test.labels.tolist() == [value // 100 for value in values(data.test)] == [0] * 5 + [1] * 5
    assert values(data.train) == sorted(values(data.train))
    assert values(read(tmp_path, test_share=0.25).test) == values(data.test)


@pytest.mark.parametrize("name", ["test", "val", "valid", "validation"])
def test_splits(tmp_path: Path, name: str) -> None:
    for label, kind in enumerate(("a", "b")):
        paint(tmp_path / "train" / kind / "x.png", 10 + label)
        paint(tmp_path / name / kind / "x.png", 20 + label)
    data = read(tmp_path)
    assert (values(data.train), data.train.labels.tolist()) == ([10, 11], [0, 1])
    assert (values(data.test), data.test.labels.tolist()) == ([20, 21], [0, 1])


def test_an_unlabeled_test_folder_is_passed_over_for_a_labeled_val(tmp_path: Path) -> None:
    for label, kind in enumerate(("a", "b")):
        paint(tmp_path / "train" / kind / "x.png", 10 + label)
        paint(tmp_path / "val" / kind / "x.png", 20 + label)
    paint(tmp_path / "test" / "x.png", 30)
    assert values(read(tmp_path).test) == [20, 21]


def test_a_test_split_with_one_of_the_classes_keeps_their_numbers(tmp_path: Path) -> None:
    for label, kind in enumerate(("a", "b")):
        paint(tmp_path / "train" / kind / "x.png", label)
    paint(tmp_path / "test" / "b" / "x.png", 9)
    assert read(tmp_path).test.labels.tolist() == [1]


def test_unlabeled_splits_train_on_train_alone(tmp_path: Path) -> None:
    paint(tmp_path / "train" / "x.png", 1)
    paint(tmp_path / "test" / "x.png", 2)
    data = read(tmp_path)
    assert (values(data.train), data.test) == ([1], None)


def test_train_alone_is_a_split_but_among_others_a_class(tmp_path: Path) -> None:
    for kind in ("a", "b"):
        for number in range(3):
            paint(tmp_path / "one" / "train" / kind / f"{number}.png")
            paint(tmp_path / "two" / "train" / kind / f"{number}.png")
            paint(tmp_path / "two" / "bus" / kind / f"{number}.png")
    assert read(tmp_path / "one").classes == ("a", "b")
    assert read(tmp_path / "two").classes == ("bus", "train")


def test_label_rules(tmp_path: Path) -> None:
    for kind in ("a", "b"):
        for number in range(3):
            paint(tmp_path / kind / f"{number}.png")
    assert read(tmp_path, labels="none").classes == ()
    assert len(read(tmp_path, labels="none").train) == 6
    paint(tmp_path / "loose.png")
    assert read(tmp_path).classes == ()
    with pytest.raises(UserError, match="labels=subfolder needs every image"):
        read(tmp_path, labels="subfolder")


def test_one_class_folder_counts_only_when_forced(tmp_path: Path) -> None:
    for number in range(4):
        paint(tmp_path / "only" / f"{number}.png")
    assert read(tmp_path).classes == ()
    assert read(tmp_path, labels="subfolder").classes == ("only",)


def test_a_folder_for_every_image_is_no_class(tmp_path: Path) -> None:
    for number in range(4):
        paint(tmp_path / f"album {number}" / "x.png", number)
    data = read(tmp_path)
    assert (values(data.train), data.test, data.classes) == ([0, 1, 2, 3], None, ())


def test_forced_labels_need_a_labeled_test_folder(tmp_path: Path) -> None:
    paint(tmp_path / "train" / "a" / "x.png")
    paint(tmp_path / "test" / "x.png")
    with pytest.raises(UserError, match="in class folders"):
        read(tmp_path, labels="subfolder")


def test_other_classes_in_test_are_refused(tmp_path: Path) -> None:
    for kind in ("a", "b"):
        paint(tmp_path / "train" / kind / "x.png")
    paint(tmp_path / "test" / "zebra" / "x.png")
    with pytest.raises(UserError, match="zebra"):
        read(tmp_path)


def test_other_files_are_ignored(tmp_path: Path) -> None:
    paint(tmp_path / "x.png", 5)
    paint(tmp_path / ".thumbnails" / "x.png")
    for name in ("._x.png", ".DS_Store", "readme.txt", "Thumbs.db"):
        (tmp_path / name).write_bytes(b"no image")
    data = read(tmp_path)
    assert (values(data.train), data.unreadable) == ([5], ())


def test_no_images(tmp_path: Path) -> None:
    (tmp_path / "readme.txt").write_text("nothing here")
    with pytest.raises(UserError, match="holds no image"):
        read(tmp_path)


def test_unreadable_files_are_listed_and_skipped(tmp_path: Path) -> None:
    for kind in ("a", "b"):
        for number in range(10):
            paint(tmp_path / kind / f"{number}.png", number + (100 if kind == "b" else 0))
    (tmp_path / "a" / "0.png").write_bytes(b"")
    (tmp_path / "b" / "9.png").write_text("hello")
    data = read(tmp_path)
    assert dict(data.unreadable) == {"a/0.png": "the file is empty", "b/9.png": "not an image of a known format"}
    assert sorted(values(data.train) + values(data.test)) == [*range(1, 10), *range(100, 109)]
    for part in (data.train, data.test):
        assert part.labels.tolist() == [int(value >= 100) for value in values(part)]
    with pytest.raises(UserError, match=r"2 of 20 images.*a/0.png.*empty.*images.max_unreadable"):
        read(tmp_path, max_unreadable=0.05)


def test_nothing_readable_is_refused_whatever_is_allowed(tmp_path: Path) -> None:
    (tmp_path / "x.png").write_text("hello")
    with pytest.raises(UserError, match="cannot be read"):
        read(tmp_path, max_unreadable=1.0)


@pytest.mark.parametrize(
    ("sides", "expected"),
    [([(32, 40)], 32), ([(64, 64)], 64), ([(10, 10)], 32), ([(3000, 500)], 224), ([(99, 70)], 64)],
)
def test_size_follows_the_images(tmp_path: Path, sides: Any, expected: Any) -> None:
    for number, size in enumerate(sides):
        paint(tmp_path / f"{number}.png", size=size)
    assert read(tmp_path).size == expected
    assert read(tmp_path, size=20).size == 20


def test_the_median_decides(tmp_path: Path) -> None:
    for number, side in enumerate((40, 48, 200)):
        paint(tmp_path / f"{number}.png", size=(side, side))
    assert read(tmp_path).size == 48


def test_limit_applies_to_train_only_and_is_balanced(tmp_path: Path) -> None:
    for label, kind in enumerate(("a", "b")):
        for number in range(20 if kind == "a" else 5):
            paint(tmp_path / "train" / kind / f"{number:02}.png", 100 * label + number)
        paint(tmp_path / "test" / kind / "x.png")
    data = read(tmp_path, limit=8)
    assert torch.bincount(data.train.labels).tolist() == [4, 4]
    assert data.train.labels.tolist() == [value // 100 for value in values(data.train)]
    assert len(data.test) == 2
    assert len(read(tmp_path, limit=1000).train) == 25


@pytest.mark.skipif(os.name == "nt", reason="links need rights on Windows")
def test_links_in_a_circle_end(tmp_path: Path) -> None:
    paint(tmp_path / "a" / "x.png", 1)
    paint(tmp_path / "b" / "x.png", 2)
    (tmp_path / "a" / "up").symlink_to(tmp_path, target_is_directory=True)
    (tmp_path / "b" / "self").symlink_to(tmp_path / "b", target_is_directory=True)
    (tmp_path / "b" / "nowhere.png").symlink_to(tmp_path / "missing.png")
    data = read(tmp_path, labels="none", max_unreadable=0.5)
    assert sorted(values(data.train)) == [1, 2]
    assert [file for file, _ in data.unreadable] == ["b/nowhere.png"]


@pytest.mark.skipif(os.name == "nt", reason="links need rights on Windows")
@pytest.mark.parametrize("labels", ["auto", "none"])
def test_a_link_to_itself_is_skipped(tmp_path: Path, labels: Any) -> None:
    """As a file it is unreadable, under another name it is ignored; beside the class folders too."""
    for kind in ("a", "b"):
        for number in range(10):
            paint(tmp_path / kind / f"{number}.png", number)
    for name in ("a/loop.png", "a/loop", "loop", "train"):
        (tmp_path / name).symlink_to(tmp_path / name)
    data = read(tmp_path, labels=labels)
    assert data.classes == (("a", "b") if labels == "auto" else ())
    assert [file for file, _ in data.unreadable] == ["a/loop.png"]
    assert "symbolic links" in data.unreadable[0][1]
    assert len(data.train) + (len(data.test) if data.test else 0) == 20


def test_a_folder_deleted_while_it_is_read_is_said_to_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(3):
        paint(tmp_path / "photos" / f"{number}.png", number)
    decoded = decode.decode

    def delete_first(path: Any, size: Any) -> Any:
        shutil.rmtree(path.parent, ignore_errors=True)
        return decoded(path, size)

    monkeypatch.setattr(decode, "decode", delete_first)
    with pytest.raises(UserError, match=r"photos does not exist any more; it was deleted while it was read"):
        read(tmp_path / "photos")


@pytest.mark.parametrize("moment", ["split folders", "files"])
def test_a_folder_deleted_before_it_is_listed_is_said_to_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: Any
) -> None:
    paint(tmp_path / "photos" / "x.png")
    name = "_split_folders" if moment == "split folders" else "_listed"
    listed = getattr(image_folder, name)

    def delete_first(root: Any, *rest: Any) -> Any:
        shutil.rmtree(root)
        return listed(root, *rest)

    monkeypatch.setattr(image_folder, name, delete_first)
    with pytest.raises(UserError, match="does not exist any more"):
        read(tmp_path / "photos")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes here")
def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    paint(tmp_path / "x.png", 1)
    os.mkfifo(tmp_path / "pipe.png")
    assert values(read(tmp_path).train) == [1]


@pytest.mark.skipif(os.name == "nt", reason="names are bytes on POSIX only")
def test_names_that_are_no_text(tmp_path: Path) -> None:
    paint(tmp_path / "a" / "x.png", 1)
    paint(tmp_path / "b" / "x.png", 2)
    (tmp_path / "a" / os.fsdecode(b"\xff.png")).touch()
    data = read(tmp_path, labels="none", max_unreadable=0.5)
    assert [file for file, _ in data.unreadable] == ["a/\\udcff.png"]


def test_many_files_keep_their_order(tmp_path: Path) -> None:
    """More than one window of work, decoded by several threads."""
    generator = np.random.default_rng(0)
    pixels = generator.integers(0, 256, (1100, 8, 8, 3), dtype=np.uint8)
    for number, image in enumerate(pixels):
        Image.fromarray(image).save(tmp_path / f"{number:04}.bmp")
    data = read(tmp_path, size=8)
    assert np.array_equal(data.train.take(torch.arange(1100)).numpy(), pixels.transpose(0, 3, 1, 2))
