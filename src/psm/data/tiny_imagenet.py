"""Tiny ImageNet in its published layout: train/<wnid>/images, val/images with val_annotations.txt, words.txt."""

from pathlib import Path

import numpy as np

from psm.config.schema import ImagesConfig
from psm.data import splits as choosing
from psm.data.dataset import ImageDataset
from psm.data.image_files import File, Part, assemble, listing, shown
from psm.utils.errors import UserError

_SIZE = 64
_PAPER_SHARE = 0.1  # 10,000 of the 100,000 labeled images test


def found(root: Path) -> Path | None:
    """The set's folder, if that is ``root`` or the published folder in it."""
    for place in (root, root / "tiny-imagenet-200"):
        train = place / "train"
        if (place / "val" / "val_annotations.txt").is_file() or (place / "wnids.txt").is_file():
            wnids = (entry for entry in train.iterdir() if entry.is_dir()) if train.is_dir() else ()
            if any((wnid / "images").is_dir() for wnid in wnids):
                return place
    return None


def load(root: Path, config: ImagesConfig, progress: bool) -> ImageDataset:
    """The set with the paper's split of its labeled images, or with the official one."""
    files = listing(root, "train")
    wnids = [file.path.split("/")[1] for file in files]
    present = sorted(set(wnids))
    if not present:
        raise UserError(f"{shown(root / 'train')} holds no image; unpack tiny-imagenet-200.zip there once more.")
    number = {wnid: place for place, wnid in enumerate(present)}
    labeled = Part(files, np.array([number[wnid] for wnid in wnids], dtype=np.int64))
    if config.split == "paper":
        held = choosing.held_out(labeled.labels, _PAPER_SHARE)
        train, test = labeled.take(np.flatnonzero(~held)), labeled.take(np.flatnonzero(held))
    else:
        train, test = labeled, _validation(root, number)
    words = _words(root)
    classes = tuple(words.get(wnid, wnid) for wnid in present)
    return assemble("tiny-imagenet", root, train, test, classes, config.size or _SIZE, config, progress)


def _validation(root: Path, number: dict[str, int]) -> Part:
    """The val images that the annotations name and whose class has training images."""
    annotations = root / "val" / "val_annotations.txt"
    try:
        rows = [line.split("\t") for line in annotations.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError):
        raise UserError(
            f"images.split=official needs {shown(annotations)}, which is missing or cannot be read; unpack "
            "tiny-imagenet-200.zip once more, or use images.split=paper."
        ) from None
    wnid_of = {row[0]: row[1] for row in rows if len(row) > 1}
    pairs: list[tuple[File, int]] = []
    for file in listing(root, "val/images"):
        wnid = wnid_of.get(file.path.rsplit("/", 1)[-1])
        if wnid in number:
            pairs.append((file, number[wnid]))
    if not pairs:
        raise UserError(f"{shown(annotations)} names no image of val/images; unpack tiny-imagenet-200.zip once more.")
    return Part([file for file, _ in pairs], np.array([label for _, label in pairs], dtype=np.int64))


def _words(root: Path) -> dict[str, str]:
    """The first name of each wnid; without words.txt the wnids themselves serve."""
    path = root / "words.txt"
    if not path.is_file():
        return {}
    rows = (line.split("\t", 1) for line in path.read_text(encoding="utf-8", errors="replace").splitlines())
    return {row[0]: row[1].split(",")[0].strip() for row in rows if len(row) == 2}
