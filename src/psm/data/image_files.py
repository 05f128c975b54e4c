"""Image files below a folder: listing them, and decoding them in parallel into one set."""

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from psm.config.schema import ImagesConfig
from psm.data import decode
from psm.data import materialize as store
from psm.data import splits as choosing
from psm.data.dataset import ImageDataset, ImageStore
from psm.utils.errors import UserError

_SAMPLE = 200
_GROUP = 8  # files a thread takes at a time: small images decode faster than they are handed over


@dataclass(frozen=True)
class File:
    """An image file: its path below the data folder, and what tells whether it has changed."""

    path: str
    bytes: int
    changed: int


@dataclass(frozen=True)
class Part:
    """The files of one split, with labels int64 (N,) where there are any."""

    files: list[File]
    labels: np.ndarray | None = None

    def take(self, indices: np.ndarray) -> "Part":
        return Part([self.files[i] for i in indices], None if self.labels is None else self.labels[indices])


def listing(root: Path, below: str = "") -> list[File]:
    """Every image file below ``root/below``, sorted by path. Paths are relative to ``root``.

    Hidden names and other extensions are passed over. Links are followed, but each real folder is read once, so that
    links in a circle end.
    """
    files, waiting, seen = [], [below], set()
    while waiting:
        folder = waiting.pop()
        try:
            identity = (root / folder).stat()
            entries = sorted(os.scandir(root / folder), key=lambda entry: entry.name)
        except OSError as error:
            raise UserError(f"The folder {shown(root / folder)} cannot be read ({error.strerror}).") from None
        if (identity.st_dev, identity.st_ino) in seen:
            continue
        seen.add((identity.st_dev, identity.st_ino))
        for entry in entries:
            path = f"{folder}/{entry.name}" if folder else entry.name
            if entry.name.startswith("."):
                continue
            if entry.is_dir():
                waiting.append(path)
            elif Path(entry.name).suffix.lower() in decode.EXTENSIONS:
                files += _file(entry, path)
    return sorted(files, key=lambda file: file.path)


def _file(entry: os.DirEntry, path: str) -> list[File]:
    """The file, or nothing for a pipe or device, which would wait for ever when read."""
    try:
        facts = entry.stat()
    except OSError:  # a link to nowhere: listed, to be reported as unreadable
        return [File(path, 0, 0)]
    return [File(path, facts.st_size, facts.st_mtime_ns)] if entry.is_file() else []


def typical_size(root: Path, files: list[File]) -> int:
    """The size at which to hold images: their median shorter side, from 32 to 224, a multiple of 8."""
    places = np.unique(np.linspace(0, len(files) - 1, min(_SAMPLE, len(files))).round().astype(int))
    sides = []
    with decode.quietly():
        for place in places:
            try:
                sides.append(decode.shorter_side(root / files[place].path))
            except decode.Unreadable:
                continue
    median = int(np.median(sides)) if sides else 32
    return min(max(median, 32), 224) // 8 * 8


def assemble(
    name: str,
    root: Path,
    train: Part,
    test: Part | None,
    classes: tuple[str, ...],
    size: int,
    config: ImagesConfig,
    progress: bool,
) -> ImageDataset:
    """Decode the files of a set, leaving out those that cannot be read."""
    train = train.take(choosing.kept(train.labels, len(train.files), config.limit))
    parts = [train] if test is None else [train, test]
    with ThreadPoolExecutor(_threads()) as pool, decode.quietly():
        recipes = [_recipe(name, root, part.files, size, pool) for part in parts]
        made = store.hold(recipes, config, progress)
    unreadable = tuple(
        (shown(part.files[index].path), reason)
        for part, result in zip(parts, made, strict=True)
        for index, reason in result.failures
    )
    _check_unreadable(root, unreadable, sum(len(part.files) for part in parts), config)
    stores = [_images(part, result) for part, result in zip(parts, made, strict=True)]
    if any(len(images) == 0 for images in stores):
        raise UserError(f"A split of {shown(root)} has no readable image at all; replace its files.")
    return ImageDataset(name, stores[0], stores[1] if test is not None else None, classes, unreadable)


def shown(path: str | Path) -> str:
    """A path as printable text; file names need not be."""
    return str(path).encode("utf-8", "backslashreplace").decode()


def _threads() -> int:
    # Decoding happens outside the interpreter's lock, so that threads are enough.
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _recipe(name: str, root: Path, files: list[File], size: int, pool: ThreadPoolExecutor) -> store.Recipe:
    def attempt(few: list[File]) -> list[np.ndarray | str]:
        return [_decoded(root / file.path, size) for file in few]

    def make(start: int, stop: int) -> tuple[np.ndarray, list[store.Failure]]:
        groups = [files[place : min(place + _GROUP, stop)] for place in range(start, stop, _GROUP)]
        results = [result for group in pool.map(attempt, groups) for result in group]
        pixels = [result for result in results if not isinstance(result, str)]
        failures = [(start + i, result) for i, result in enumerate(results) if isinstance(result, str)]
        return (np.stack(pixels) if pixels else np.empty((0, 3, size, size), dtype=np.uint8)), failures

    return store.Recipe(f"reading {name}", len(files), size, _fingerprint(root, files, size), make)


def _decoded(path: Path, size: int) -> np.ndarray | str:
    """The image, or the reason why there is none."""
    try:
        return decode.decode(path, size)
    except decode.Unreadable as error:
        return shown(str(error))


def _fingerprint(root: Path, files: list[File], size: int) -> str:
    digest = hashlib.sha256(f"files {decode.VERSION} {size}\0".encode() + os.fsencode(root.resolve()))
    for file in files:
        digest.update(os.fsencode(file.path) + f"\0{file.bytes} {file.changed}\0".encode())
    return digest.hexdigest()[:32]


def _images(part: Part, made: store.Made) -> ImageStore:
    if part.labels is None:
        return ImageStore(made.pixels)
    return ImageStore(made.pixels, torch.from_numpy(part.labels[made.present(len(part.files))]))


def _check_unreadable(root: Path, unreadable: tuple, count: int, config: ImagesConfig) -> None:
    if len(unreadable) <= config.max_unreadable * count and len(unreadable) < count:
        return
    first = "; ".join(f"{file} ({reason})" for file, reason in unreadable[:3])
    more = f"; and {len(unreadable) - 3:,} more" if len(unreadable) > 3 else ""
    raise UserError(
        f"{len(unreadable):,} of {count:,} images in {shown(root)} cannot be read, more than "
        f"images.max_unreadable={config.max_unreadable:g} allows: {first}{more}. "
        "Remove or replace them, or raise images.max_unreadable."
    )
