"""A folder with all that the pages take for granted: images in each layout, published sets, runs of an hour ago."""

import csv
import io
import os
import pickle
import shutil
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from PIL import Image

from psm.data import synthetic_shapes as shapes

CLASSES = list(shapes.CLASSES)

SMALL_RUN: dict[str, Any] = {
    "epochs": 2,
    "batch_size": 16,
    "images": {"limit": 48, "size": 16},
    "heads": {"hidden_dim": 24, "out_dim": 12},
    "bank": {"size": 32},
    "monitor": {"images": 32, "test_images": 32},
    "save": {"snapshots": 1},
    "progress": False,
}


def pictures(first: int = 0) -> Iterator[tuple[str, Image.Image]]:
    """Images of 64 pixels with the names of their classes, one after the other."""
    number = first // shapes.BLOCK
    while True:
        kinds = shapes.labels(shapes.BLOCK, first=number * shapes.BLOCK)
        for kind, pixels in zip(kinds, shapes.block("train", number, 64), strict=True):
            yield CLASSES[kind], Image.fromarray(pixels.transpose(1, 2, 0))
        number += 1


def flat(folder: Path, count: int) -> None:
    """Images beside each other."""
    folder.mkdir(parents=True)
    for number, (_, image) in zip(range(count), pictures(), strict=False):
        image.save(folder / f"{number:04d}.jpg", quality=90)


def by_class(folder: Path, count: int, inner: str = "", suffix: str = "jpg", classes: int = 10) -> None:
    """Images in a subfolder for each class."""
    for number, (name, image) in zip(range(count), pictures(), strict=False):
        if CLASSES.index(name) >= classes:
            continue
        path = folder / name / inner / f"{name}_{number}.{suffix}"
        path.parent.mkdir(parents=True, exist_ok=True)
        image.save(path, "JPEG", quality=90)


def tiny_imagenet(folder: Path) -> None:
    """The published layout: train/WNID/images, val/images with its annotations."""
    by_class(folder / "train", 80, inner="images", suffix="JPEG")
    (folder / "wnids.txt").write_text("\n".join(CLASSES))
    (folder / "words.txt").write_text("\n".join(f"{name}\tthe {name}" for name in CLASSES))
    (folder / "val" / "images").mkdir(parents=True)
    rows = []
    for number, (name, image) in zip(range(20), pictures(512), strict=False):
        file = f"val_{9030 + number}.JPEG"
        image.save(folder / "val" / "images" / file, quality=90)
        rows.append(f"{file}\t{name}\t0\t0\t63\t63")
    (folder / "val" / "val_annotations.txt").write_text("\n".join(rows))


def cifar(folder: Path) -> None:
    """CIFAR-10's Python layout, with 60 images a file."""
    folder.mkdir(parents=True)
    names = [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]
    for number, name in enumerate(names):
        rows = shapes.block("train", number, 32)[:60].reshape(60, -1)
        labels = [int(label) for label in shapes.labels(60, first=number * shapes.BLOCK)]
        content = {b"data": rows, b"labels": labels, b"batch_label": name.encode(), b"filenames": [b"x.png"] * 60}
        (folder / name).write_bytes(pickle.dumps(content, protocol=2))
    meta = {b"label_names": [name.encode() for name in CLASSES], b"num_cases_per_batch": 60, b"num_vis": 3072}
    (folder / "batches.meta").write_bytes(pickle.dumps(meta, protocol=2))


def shard_files(folder: Path, prefix: str = "") -> None:
    """147 shards of two images each, in WebDataset's layout."""
    folder.mkdir(parents=True, exist_ok=True)
    drawn = pictures()
    for number in range(147):
        with tarfile.open(folder / f"{prefix}{number:06d}.tar", "w") as archive:
            for sample in range(2):
                name, image = next(drawn)
                data = io.BytesIO()
                image.save(data, "JPEG", quality=80)
                for suffix, content in (
                    ("jpg", data.getvalue()),
                    ("cls", str(CLASSES.index(name)).encode()),
                ):
                    entry = tarfile.TarInfo(f"{number:06d}{sample}.{suffix}")
                    entry.size = len(content)
                    archive.addfile(entry, io.BytesIO(content))


def file_lists(work: Path) -> None:
    """list.csv with 350 images, manifest.parquet with the same: paths and labels."""
    import pyarrow
    import pyarrow.parquet

    by_class(work / "listed", 350)
    paths = sorted((work / "listed").rglob("*.jpg"))
    rows = [(str(path.relative_to(work)), path.parent.name) for path in paths]
    with (work / "list.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("path", "label"), *rows])
    table = pyarrow.table({"path": [row[0] for row in rows], "label": [row[1] for row in rows]})
    pyarrow.parquet.write_table(table, work / "manifest.parquet")


def hugging_face(folder: Path) -> None:
    """A dataset as `save_to_disk` writes it, with a train and a test split."""
    import datasets

    def split(first: int, count: int) -> datasets.Dataset:
        drawn = [pair for _, pair in zip(range(count), pictures(first), strict=False)]
        features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=CLASSES)})
        return datasets.Dataset.from_dict(
            {"image": [image for _, image in drawn], "label": [name for name, _ in drawn]}, features=features
        )

    datasets.DatasetDict({"train": split(0, 60), "test": split(512, 20)}).save_to_disk(str(folder))


def make_world(root: Path) -> None:
    """Home folder, working folder and what stands at absolute paths, below ``root``."""
    home, work = root / "home", root / "work"
    for folder, count in ((home / "photos", 60), (home / "more", 20), (work / "my" / "images", 60)):
        flat(folder, count)
    flat(work / "more" / "photos", 20)
    for folder in (work / "photos", work / "my" / "labeled", work / "labeled" / "images", root / "shared" / "images"):
        by_class(folder, 90, classes=3)
    tiny_imagenet(work / "tiny-imagenet-20")
    cifar(work / "data" / "cifar-10-batches-py")
    file_lists(work)
    for name in ("photo", "a", "b"):
        next(pictures())[1].save(work / f"{name}.jpg")
    hugging_face(work / "saved")
    shutil.copytree(work / "saved", work / "path" / "or" / "name")
    (root / "sets").mkdir()
    for name, source in (
        ("cifar-10-batches-py", work / "data" / "cifar-10-batches-py"),
        ("tiny-imagenet-200", work / "tiny-imagenet-20"),
        ("imagenet", work / "photos"),
    ):
        (root / "sets" / name).symlink_to(source)
    (root / "data").symlink_to(work / "data")
    for name in (root / "new" / "place", work / "moved" / "images"):
        name.parent.mkdir()
        name.symlink_to(work / "photos")
    (work / "path" / "to").mkdir()
    (work / "path" / "to" / "tiny-imagenet-20").symlink_to(work / "tiny-imagenet-20")
    for folder in (home / ".zfunc", home / ".config" / "fish" / "completions"):
        folder.mkdir(parents=True)  # those shells' own


def train_runs(work: Path) -> None:
    """runs/a, runs/b, runs/clf, runs/demo with the tiny encoder; runs/large with ResNet-18."""
    import psm

    images = str(work / "photos")
    psm.pretrain(work / "runs" / "a", data=images, encoder="tiny", **SMALL_RUN)
    psm.pretrain(work / "runs" / "b", data="shapes", encoder="tiny", **SMALL_RUN)
    psm.pretrain(work / "runs" / "large", data=images, encoder="resnet18", **SMALL_RUN | {"epochs": 1})
    few = {"epochs": 1, "batch_size": 16, "progress": False}
    psm.finetune(work / "runs" / "a", images, work / "runs" / "clf", **few)
    shutil.copytree(work / "runs" / "b", work / "runs" / "demo")


def copy_world(source: Path, target: Path) -> Path:
    """A copy for one page: images are linked, runs copied; symbolic links stay what they are."""

    def link(one: str, other: str) -> None:
        if "/runs/" in one:
            shutil.copy2(one, other)
        else:
            os.link(one, other)

    shutil.copytree(source, target, copy_function=link, symlinks=True)
    return target
