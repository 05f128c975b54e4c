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
from psm.data import materialize as store
from psm.data import splits as choosing
from psm.data.dataset import ImageDataset, ImageStore
from psm.utils.errors import UserError

_SIDE = 32
_PIXELS = 3 * _SIDE * _SIDE

Batch = tuple[np.ndarray, np.ndarray]  # uint8 (N, 3072) and int64 (N,)


@dataclass(frozen=True)
class Layout:
    """The files of one published folder and how to read them."""

    folder: str
    name: str
    classes: int
    train: tuple[str, ...]
    test: str
    names: str
    read: Callable[[Path, int], Batch]
    read_names: Callable[[Path], list[str]]


def found(root: Path, name: str | None = None) -> tuple[Path, Layout] | None:
    """The folder that holds the named set (or either), if that is ``root`` or a published folder in it."""
    for layout in LAYOUTS:
        if name in (None, layout.name):
            for place in (root, root / layout.folder):
                if (place / layout.train[0]).is_file() and (place / layout.test).is_file():
                    return place, layout
    return None


def load(root: Path, layout: Layout, config: ImagesConfig, progress: bool) -> ImageDataset:
    """The published train and test images, all checked for their shape and labels."""
    files = [*layout.train, layout.test, layout.names]
    missing = [file for file in files if not (root / file).is_file()]
    if missing:
        raise UserError(f"{root} lacks {', '.join(missing)} of {layout.name}; unpack the published archive once more.")
    try:
        batches = [layout.read(root / file, layout.classes) for file in layout.train]
        train = tuple(np.concatenate(column) for column in zip(*batches, strict=True))
        test = layout.read(root / layout.test, layout.classes)
        classes = layout.read_names(root / layout.names)
        stamp = [(file, (facts := (root / file).stat()).st_size, facts.st_mtime_ns) for file in files]
    except OSError as error:
        raise UserError(f"The files of {layout.name} in {root} cannot be read ({error.strerror}).") from None
    if len(classes) != layout.classes:
        raise UserError(f"{root / layout.names} names {len(classes)} classes instead of {layout.classes}; replace it.")
    keep = choosing.kept(train[1], len(train[1]), config.limit)
    train = (train[0][keep], train[1][keep])
    size = config.size or _SIDE
    mark = f"cifar {decode.VERSION} {root.resolve()} {stamp} {size} {config.limit}"
    recipes = [_recipe(layout.name, part[0], size, f"{mark} {i}") for i, part in enumerate((train, test))]
    held = store.hold(recipes, config, progress)
    stores = [
        ImageStore(made.pixels, torch.from_numpy(part[1])) for made, part in zip(held, (train, test), strict=True)
    ]
    return ImageDataset(layout.name, stores[0], stores[1], tuple(classes))


def _recipe(name: str, rows: np.ndarray, size: int, mark: str) -> store.Recipe:
    def make(start: int, stop: int) -> tuple[np.ndarray, list[store.Failure]]:
        pixels = rows[start:stop].reshape(-1, 3, _SIDE, _SIDE)
        if size == _SIDE:
            return pixels, []
        images = (Image.fromarray(np.ascontiguousarray(image.transpose(1, 2, 0))) for image in pixels)
        return np.stack([np.asarray(decode.fitted(image, size)).transpose(2, 0, 1) for image in images]), []

    fingerprint = hashlib.sha256(mark.encode("utf-8", "backslashreplace")).hexdigest()[:32]
    return store.Recipe(f"reading {name}", len(rows), size, fingerprint, make)


def _read_pickle(path: Path, classes: int) -> Batch:
    content = _entries(path)
    data = safe_pickle.as_array(content.get("data"))
    labels = content.get("labels" if classes == 10 else "fine_labels")
    array = safe_pickle.as_array(labels)
    labels = labels if array is None else array.tolist()
    if data is None or data.dtype != np.uint8 or data.ndim != 2 or data.shape[1] != _PIXELS or len(data) == 0:
        raise UserError(f"{path} holds no uint8 images of {_PIXELS} values each; replace it by the published file.")
    if not isinstance(labels, list) or not all(type(label) is int for label in labels):
        raise UserError(f"{path} holds no list of labels; replace it by the published file.")
    return data, _checked(path, labels, len(data), classes)


def _checked(path: Path, labels: Any, count: int, classes: int) -> np.ndarray:
    if len(labels) != count:
        raise UserError(f"{path} holds {count} images and {len(labels)} labels; replace it by the published file.")
    if min(labels) < 0 or max(labels) >= classes:
        raise UserError(f"{path} holds labels outside 0 to {classes - 1}; replace it by the published file.")
    return np.array(labels, dtype=np.int64)


def _read_binary(path: Path, classes: int) -> Batch:
    head = 1 if classes == 10 else 2  # CIFAR-100 puts the coarse label before the fine one
    values = np.fromfile(path, dtype=np.uint8)
    if len(values) == 0 or len(values) % (head + _PIXELS):
        raise UserError(
            f"{path} has {len(values):,} bytes, not a whole number of images of {head + _PIXELS}; it is cut short, "
            "replace it by the published file."
        )
    rows = values.reshape(-1, head + _PIXELS)
    return rows[:, head:], _checked(path, rows[:, head - 1], len(rows), classes)


def _entries(path: Path) -> dict[str, Any]:
    content = safe_pickle.read(path)
    if not isinstance(content, dict):
        raise UserError(f"{path} holds no dictionary; replace it by the published file.")
    return {_text(key): value for key, value in content.items()}


def _pickled_names(key: str) -> Callable[[Path], list[str]]:
    def read(path: Path) -> list[str]:
        names = _entries(path).get(key)
        return [_text(name) for name in names] if isinstance(names, list) else []

    return read


def _lines(path: Path) -> list[str]:
    return [line.strip() for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]


def _text(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def _ten(folder: str, ending: str, names: str, *readers: Callable) -> Layout:
    train = tuple(f"data_batch_{number}{ending}" for number in range(1, 6))
    return Layout(folder, "cifar10", 10, train, f"test_batch{ending}", names, *readers)


def _hundred(folder: str, ending: str, names: str, *readers: Callable) -> Layout:
    return Layout(folder, "cifar100", 100, (f"train{ending}",), f"test{ending}", names, *readers)


LAYOUTS = (
    _ten("cifar-10-batches-py", "", "batches.meta", _read_pickle, _pickled_names("label_names")),
    _ten("cifar-10-batches-bin", ".bin", "batches.meta.txt", _read_binary, _lines),
    _hundred("cifar-100-python", "", "meta", _read_pickle, _pickled_names("fine_label_names")),
    _hundred("cifar-100-binary", ".bin", "fine_label_names.txt", _read_binary, _lines),
)
