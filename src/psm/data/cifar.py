"""CIFAR-10 and CIFAR-100 as published, in the Python (pickle) or the binary layout."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from psm.config.schema import ImagesConfig
from psm.data import decode, safe_pickle
from psm.data.cache import Failure
from psm.data.dataset import ImageDataset, ImageStore
from psm.data.materialize import PixelSource, materialize
from psm.data.names import PositionNames
from psm.data.splits import limit_indices
from psm.utils.errors import UserError

_SIZE = 32
_VALUES = 3 * _SIZE * _SIZE  # of an image

FileContent = tuple[np.ndarray, np.ndarray]  # images uint8 (N, 3072) and labels int64 (N,)


@dataclass(frozen=True)
class Layout:
    """The files of one published folder and how to read them."""

    folder: str
    name: str
    classes: int
    train: tuple[str, ...]
    test: str
    meta: str
    read: Callable[[Path, int], FileContent]
    read_classes: Callable[[Path], list[str]]

    @property
    def files(self) -> tuple[str, ...]:
        """All files of the folder."""
        return (*self.train, self.test, self.meta)


@dataclass(frozen=True)
class _Split:
    """Images of one split as published, with labels and names."""

    images: np.ndarray  # uint8 (N, 3072)
    labels: np.ndarray  # int64 (N,)
    names: PositionNames


def find(root: Path, name: str | None = None) -> tuple[Path, Layout] | None:
    """The folder of the named data set (None: of either) and its layout, if that is ``root`` or is in it."""
    for layout in LAYOUTS:
        if name in (None, layout.name):
            for folder in (root, root / layout.folder):
                if (folder / layout.train[0]).is_file() and (folder / layout.test).is_file():
                    return folder, layout
    return None


def load(root: Path, layout: Layout, config: ImagesConfig, progress: bool, shared: bool = False) -> ImageDataset:
    """The published train and test images, checked for their shape and labels."""
    missing = [file for file in layout.files if not (root / file).is_file()]
    if missing:
        raise UserError(f"{root} lacks {', '.join(missing)} of {layout.name}; unpack the published archive once more.")
    try:
        train = _read_split(root, layout, layout.train, config.limit)
        test = _read_split(root, layout, (layout.test,), None)
        classes = layout.read_classes(root / layout.meta)
        status = [(file, (root / file).stat()) for file in layout.files]
    except OSError as error:
        raise UserError(f"The files of {layout.name} in {root} cannot be read ({error.strerror}).") from None
    if len(classes) != layout.classes:
        raise UserError(f"{root / layout.meta} names {len(classes)} classes instead of {layout.classes}; replace it.")
    size = config.side(_SIZE)
    state = [(file, stat.st_size, stat.st_mtime_ns) for file, stat in status]
    key = f"cifar {decode.VERSION} {root.resolve()} {state} {size} {config.limit}"
    sources = [_source(layout.name, split.images, size, f"{key} {i}") for i, split in enumerate((train, test))]
    stores = [
        ImageStore(result.held(size), torch.from_numpy(split.labels), split.names)
        for result, split in zip(materialize(sources, config, progress, shared), (train, test), strict=True)
    ]
    return ImageDataset(layout.name, stores[0], stores[1], tuple(classes))


def _read_split(root: Path, layout: Layout, files: tuple[str, ...], limit: int | None) -> _Split:
    """The images of some files, or as many of them as the limit allows."""
    contents = [layout.read(root / file, layout.classes) for file in files]
    images, labels = (np.concatenate(column) for column in zip(*contents, strict=True))
    counts = [len(file_labels) for _, file_labels in contents]
    if limit is None or limit >= len(labels):
        return _Split(images, labels, PositionNames(files, counts))
    kept = limit_indices(labels, len(labels), limit)
    return _Split(images[kept], labels[kept], PositionNames(files, counts, kept))


def _source(name: str, rows: np.ndarray, size: int, key: str) -> PixelSource:
    """The images (N, 3072), resized where another size is asked for."""

    def read(start: int, stop: int) -> tuple[np.ndarray, list[Failure]]:
        pixels = rows[start:stop].reshape(-1, 3, _SIZE, _SIZE)
        if size == _SIZE:
            return pixels, []
        images = (Image.fromarray(np.ascontiguousarray(image.transpose(1, 2, 0))) for image in pixels)
        return np.stack([np.asarray(decode.center_square(image, size)).transpose(2, 0, 1) for image in images]), []

    fingerprint = hashlib.sha256(key.encode("utf-8", "backslashreplace")).hexdigest()[:32]
    return PixelSource(f"reading {name}", len(rows), size, fingerprint, read)


def _read_pickle(path: Path, classes: int) -> FileContent:
    content = _entries(path)
    data = safe_pickle.as_array(content.get("data"))
    labels = content.get("labels" if classes == 10 else "fine_labels")
    array = safe_pickle.as_array(labels)
    labels = labels if array is None else array.tolist()
    if data is None or data.dtype != np.uint8 or data.ndim != 2 or data.shape[1] != _VALUES or len(data) == 0:
        raise UserError(f"{path} holds no uint8 images of {_VALUES} values each; replace it by the published file.")
    if not isinstance(labels, list) or not all(type(label) is int for label in labels):
        raise UserError(f"{path} holds no list of labels; replace it by the published file.")
    return data, _checked(path, labels, len(data), classes)


def _checked(path: Path, labels: Any, count: int, classes: int) -> np.ndarray:
    if len(labels) != count:
        raise UserError(f"{path} holds {count} images and {len(labels)} labels; replace it by the published file.")
    if min(labels) < 0 or max(labels) >= classes:
        raise UserError(f"{path} holds labels outside 0 to {classes - 1}; replace it by the published file.")
    return np.array(labels, dtype=np.int64)


def _read_binary(path: Path, classes: int) -> FileContent:
    head = 1 if classes == 10 else 2  # CIFAR-100 puts the coarse label before the fine one
    values = np.fromfile(path, dtype=np.uint8)
    if len(values) == 0 or len(values) % (head + _VALUES):
        raise UserError(
            f"{path} has {len(values):,} bytes, not a whole number of images of {head + _VALUES}; it is cut short, "
            "replace it by the published file."
        )
    rows = values.reshape(-1, head + _VALUES)
    return rows[:, head:], _checked(path, rows[:, head - 1], len(rows), classes)


def _entries(path: Path) -> dict[str, Any]:
    content = safe_pickle.read(path)
    if not isinstance(content, dict):
        raise UserError(f"{path} holds no dictionary; replace it by the published file.")
    return {_text(key): value for key, value in content.items()}


def _pickled_classes(key: str) -> Callable[[Path], list[str]]:
    def read(path: Path) -> list[str]:
        names = _entries(path).get(key)
        return [_text(name) for name in names] if isinstance(names, list) else []

    return read


def _lines(path: Path) -> list[str]:
    return [line.strip() for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]


def _text(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def _ten(folder: str, ending: str, meta: str, *readers: Callable) -> Layout:
    train = tuple(f"data_batch_{number}{ending}" for number in range(1, 6))
    return Layout(folder, "cifar10", 10, train, f"test_batch{ending}", meta, *readers)


def _hundred(folder: str, ending: str, meta: str, *readers: Callable) -> Layout:
    return Layout(folder, "cifar100", 100, (f"train{ending}",), f"test{ending}", meta, *readers)


LAYOUTS = (
    _ten("cifar-10-batches-py", "", "batches.meta", _read_pickle, _pickled_classes("label_names")),
    _ten("cifar-10-batches-bin", ".bin", "batches.meta.txt", _read_binary, _lines),
    _hundred("cifar-100-python", "", "meta", _read_pickle, _pickled_classes("fine_label_names")),
    _hundred("cifar-100-binary", ".bin", "fine_label_names.txt", _read_binary, _lines),
)
