"""Tiny ImageNet in its published layout: train/<wnid>/images, val/images with val_annotations.txt, words.txt."""

from pathlib import Path

import numpy as np

from psm.config.schema import ImagesConfig
from psm.data.dataset import ImageDataset
from psm.data.file_index import list_files, subfolders
from psm.data.image_files import FileSet, FileSplit, load_files, number_classes
from psm.data.names import printable
from psm.data.splits import held_out_mask
from psm.utils.errors import UserError

_FOLDER = "tiny-imagenet-200"
_SIZE = 64
_PAPER_TEST_FRACTION = 0.1  # 10,000 of the 100,000 labeled images


def find(root: Path) -> Path | None:
    """The data set's folder, if that is ``root`` or the published folder in it."""
    for folder in (root, root / _FOLDER):
        if (folder / "val" / "val_annotations.txt").is_file() or (folder / "wnids.txt").is_file():
            train = folder / "train"
            wnids = subfolders(train) if train.is_dir() else []
            if any((train / wnid / "images").is_dir() for wnid in wnids):
                return folder
    return None


def every_file(root: Path, config: ImagesConfig) -> tuple[FileSplit, tuple[str, ...]]:
    """All images in the order of their paths, whatever their split, and the class names; label -1 where none is known.

    Images of val have the class that the annotations name.
    """
    files = list_files(root, "", config)
    present = sorted({path.split("/")[1] for path in files.paths if path.startswith("train/")})
    number = {wnid: index for index, wnid in enumerate(present)}
    annotated = _annotations(root) if (root / "val" / "val_annotations.txt").is_file() else {}
    labels = np.full(len(files), -1, dtype=np.int64)
    for row, path in enumerate(files.paths):
        split, _, rest = path.partition("/")
        wnid = annotated.get(Path(path).name) if split == "val" else rest.partition("/")[0]
        labels[row] = number.get(wnid or "", -1) if split in ("train", "val") else -1
    return FileSplit(files, labels), _class_names(root, present)


def load(root: Path, config: ImagesConfig, progress: bool, shared: bool = False) -> ImageDataset:
    """The data set with the paper's split of its labeled images, or with the official one."""
    return load_files(scan(root, config), config.side(_SIZE), config, progress, shared)


def scan(root: Path, config: ImagesConfig) -> FileSet:
    """The files of both splits."""
    files = list_files(root, "train", config)
    wnids = [path.split("/")[1] for path in files.paths]
    present = sorted(set(wnids))
    if not present:
        raise UserError(f"{printable(root / 'train')} holds no image; unpack tiny-imagenet-200.zip there once more.")
    labels = number_classes(wnids, present)
    train, test = FileSplit(files, labels), None
    if config.split == "paper":
        held_out = held_out_mask(labels, _PAPER_TEST_FRACTION)
        train, test = train.take(np.flatnonzero(~held_out)), train.take(np.flatnonzero(held_out))
    else:
        test = _validation(root, present, config)
    return FileSet("tiny-imagenet", train, test, _class_names(root, present))


def _validation(root: Path, present: list[str], config: ImagesConfig) -> FileSplit:
    """The val images that the annotations name and whose class has training images."""
    annotations = root / "val" / "val_annotations.txt"
    wnid_of = _annotations(root)
    files = list_files(root, "val/images", config)
    wnids = [wnid_of.get(path.rsplit("/", 1)[-1], "") for path in files.paths]
    kept = set(present)
    known = [index for index, wnid in enumerate(wnids) if wnid in kept]
    if not known:
        raise UserError(
            f"{printable(annotations)} names no image of val/images; unpack tiny-imagenet-200.zip once more."
        )
    return FileSplit(files.take(np.array(known)), number_classes([wnids[index] for index in known], present))


def _annotations(root: Path) -> dict[str, str]:
    """The wnid of each image of val."""
    annotations = root / "val" / "val_annotations.txt"
    try:
        rows = [line.split("\t") for line in annotations.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError):
        raise UserError(
            f"images.split=official needs {printable(annotations)}, which is missing or cannot be read; unpack "
            "tiny-imagenet-200.zip once more, or use images.split=paper."
        ) from None
    return {row[0]: row[1] for row in rows if len(row) > 1}


def _class_names(root: Path, wnids: list[str]) -> tuple[str, ...]:
    words = _words(root)
    return tuple(words.get(wnid, wnid) for wnid in wnids)


def _words(root: Path) -> dict[str, str]:
    """The first name of each wnid; empty without words.txt."""
    path = root / "words.txt"
    if not path.is_file():
        return {}
    rows = (line.split("\t", 1) for line in path.read_text(encoding="utf-8", errors="replace").splitlines())
    return {row[0]: row[1].split(",")[0].strip() for row in rows if len(row) == 2}
