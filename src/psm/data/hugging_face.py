"""Data sets of Hugging Face's ``datasets``: by name, saved to disk, or Parquet files; map-style."""

import hashlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from psm.config.schema import ImagesConfig
from psm.data import decode
from psm.data.cache import Failure
from psm.data.dataset import ImageDataset, ImageStore
from psm.data.image_files import ImageDecoder, image_decoder, rounded_size
from psm.data.materialize import PixelSource, materialize
from psm.data.names import FileNames
from psm.data.splits import TEST_NAMES, held_out_mask, limit_indices
from psm.data.unreadable import too_many_unreadable
from psm.utils.devices import num_cores
from psm.utils.errors import UserError
from psm.utils.indices import evenly_spaced

PREFIX = "hf:"
_IMAGES, _LABELS = ("image", "img", "jpg", "png"), ("label", "labels", "fine_label", "class", "cls", "target")
_SIZE_SAMPLE = 200  # images whose size is read


@dataclass(frozen=True)
class HfSplit:
    """Some rows of one split: the dataset, its columns of images and labels, and labels int64 (N,)."""

    source: str
    dataset: Any
    split: str
    image: str
    rows: np.ndarray
    labels: np.ndarray | None

    def take(self, indices: np.ndarray) -> "HfSplit":
        """The rows at these places."""
        labels = None if self.labels is None else self.labels[indices]
        return HfSplit(self.source, self.dataset, self.split, self.image, self.rows[indices], labels)

    def contents(self, start: int, stop: int) -> list[bytes]:
        """The content of some image files; empty where a row has none."""
        return [_content(cell) for cell in self.dataset[self.rows[start:stop].tolist()][self.image]]

    def name(self, index: int) -> str:
        """A row's name: its split and number."""
        return f"{self.split}/{self.rows[index]}"

    @property
    def fingerprint(self) -> str:
        """A digest of the rows' content, as ``datasets`` tells it."""
        digest = hashlib.sha256(f"hf {decode.VERSION} {self.dataset._fingerprint} {self.image}".encode())
        digest.update(np.ascontiguousarray(self.rows).data)
        return digest.hexdigest()[:24]


def load(source: str, config: ImagesConfig, progress: bool, shared: bool) -> ImageDataset:
    """The images of a dataset, held as those of folders are."""
    train, test, classes = scan(source, config)
    if test is None and train.labels is not None:
        held = held_out_mask(train.labels, config.test_share)
        train, test = train.take(np.flatnonzero(~held)), train.take(np.flatnonzero(held)) if held.any() else None
    train = train.take(limit_indices(train.labels, len(train.rows), config.limit))
    splits = [train] if test is None else [train, test]
    with ThreadPoolExecutor(num_cores()) as pool, decode.quiet_pillow():
        size = config.size or config.side(typical_size(train))
        sources = [_source(split, image_decoder(size, config), pool) for split in splits]
        results = materialize(sources, config, progress, shared)
    unreadable = tuple(
        (split.name(index), reason)
        for split, result in zip(splits, results, strict=True)
        for index, reason in result.failures
    )
    count = sum(len(split.rows) for split in splits)
    if len(unreadable) > config.max_unreadable * count or len(unreadable) == count:
        raise UserError(too_many_unreadable(unreadable, count, f"data={source}", config))
    stores = []
    for split, result in zip(splits, results, strict=True):
        kept = split.take(result.readable(len(split.rows)))
        labels = None if kept.labels is None else torch.from_numpy(kept.labels)
        names = FileNames(kept.name(index) for index in range(len(kept.rows)))
        stores.append(ImageStore(result.held(size), labels, names))
    name = source.removeprefix(PREFIX).partition(":")[0].rstrip("/").rpartition("/")[2]
    return ImageDataset(name, stores[0], stores[1] if test is not None else None, classes, unreadable)


def scan(source: str, config: ImagesConfig) -> tuple[HfSplit, HfSplit | None, tuple[str, ...]]:
    """Training split, test split where there is one of its own, and class names."""
    opened, wanted = _opened(source)
    tests: list[str] = []
    if not hasattr(opened, "keys"):
        train = (str(opened.split or "train"), opened)
        if wanted not in ("", train[0]):
            raise UserError(f"data={source}: there is no split {wanted!r}, only {train[0]}; leave it out.")
    elif wanted:
        if wanted not in opened:
            raise UserError(f"data={source}: there is no split {wanted!r}; give one of {', '.join(opened)}.")
        train = (wanted, opened[wanted])
    else:
        name = "train" if "train" in opened else next(iter(opened))
        train, tests = (name, opened[name]), [word for word in TEST_NAMES if word in opened and word != name]
    split, classes = _split(source, *train, config)
    if split.labels is None or not tests:
        return split, None, classes
    test, _ = _split(source, tests[0], opened[tests[0]], config)
    usable = test.labels is not None and len(test.labels) and test.labels.min() >= 0
    return split, test if usable else None, classes


def _opened(source: str) -> tuple[Any, str]:
    """The dataset or the dictionary of its splits, and the split that was asked for."""
    try:
        import datasets
    except ImportError:
        raise UserError(f"data={source} needs datasets: pip install 'psm[hf]'.") from None
    text = source.removeprefix(PREFIX)
    whole = Path(text).expanduser()
    place, _, split = (text, "", "") if whole.exists() else text.partition(":")
    path = Path(place).expanduser()
    datasets.disable_progress_bars()
    try:
        if path.is_file():
            return datasets.Dataset.from_parquet(str(path)), split
        if any((path / name).is_file() for name in ("dataset_dict.json", "state.json")):
            return datasets.load_from_disk(str(path)), split
        return datasets.load_dataset(str(path) if path.is_dir() else place), split
    except Exception as error:  # of many kinds, from files, Arrow and the network
        said = " ".join(str(error).split())[:300]
        raise UserError(
            f"data={source} cannot be opened ({type(error).__name__}: {said}); give hf: and the name of a dataset, a "
            "folder saved with save_to_disk, or Parquet files."
        ) from None


def _split(source: str, name: str, dataset: Any, config: ImagesConfig) -> tuple[HfSplit, tuple[str, ...]]:
    import datasets

    image = _image_column(dataset.features)
    if image is None:
        columns = ", ".join(list(dataset.features)[:8])
        raise UserError(f"data={source} has no column of images (it has {columns}); name one of them image.")
    if isinstance(dataset.features[image], datasets.Image):
        dataset = dataset.cast_column(image, datasets.Image(decode=False))
    rows = np.arange(len(dataset))
    if not len(rows):
        raise UserError(f"data={source} is empty: give a dataset with images.")
    labels, classes = _labels(dataset, config)
    return HfSplit(source, dataset, name, image, rows, labels), classes


def _image_column(features: Any) -> str | None:
    import datasets

    typed = [name for name, kind in features.items() if isinstance(kind, datasets.Image)]
    named = [name for name in _IMAGES if name in features]
    return next((name for name in named if name in typed), next(iter([*typed, *named]), None))


def _labels(dataset: Any, config: ImagesConfig) -> tuple[np.ndarray | None, tuple[str, ...]]:
    """Labels (N,) and class names, where there is a column of whole numbers of 0 or more."""
    import datasets

    if config.labels == "none":
        return None, ()
    typed = [name for name, kind in dataset.features.items() if isinstance(kind, datasets.ClassLabel)]
    named = [name for name in _LABELS if name in dataset.features]
    column = next((name for name in named if name in typed), next(iter([*typed, *named]), None))
    if column is None:
        return None, ()
    values = dataset.with_format("arrow")[:][column].to_pylist()
    if not all(isinstance(value, int) and value >= 0 for value in values) or len(set(values)) < 2:
        return None, ()
    names = getattr(dataset.features[column], "names", None) or [str(n) for n in range(max(values) + 1)]
    return np.array(values, dtype=np.int64), tuple(names)


def _content(cell: Any) -> bytes:
    """The bytes of a cell: binary, or a dictionary of bytes and a path."""
    if isinstance(cell, dict):
        if cell.get("bytes"):
            return bytes(cell["bytes"])
        try:
            return Path(cell["path"]).read_bytes() if cell.get("path") else b""
        except OSError:
            return b""
    return bytes(cell) if isinstance(cell, (bytes, bytearray)) else b""


def typical_size(split: HfSplit) -> int:
    """The default image size of a split, as that of files."""
    sides = []
    for index in evenly_spaced(len(split.rows), _SIZE_SAMPLE).tolist():
        try:
            sides.append(decode.shorter_side(split.contents(index, index + 1)[0]))
        except decode.Unreadable:
            continue
    return rounded_size(sides)


def _source(split: HfSplit, decoder: ImageDecoder, pool: ThreadPoolExecutor) -> PixelSource:
    def read(start: int, stop: int) -> tuple[np.ndarray | list[np.ndarray], list[Failure]]:
        return decoder.collect(list(pool.map(decoder, split.contents(start, stop))), start)

    fingerprint = f"{split.fingerprint}-{decoder.size}{'-whole' * decoder.whole}"
    title, count = f"reading {split.source}", len(split.rows)
    return PixelSource(title, count, decoder.size, fingerprint, read, True, decoder.whole)
