"""Image files below a folder: listing them, and decoding them in parallel into a data set."""

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from psm.config.schema import ImagesConfig
from psm.data import decode
from psm.data.cache import Failure
from psm.data.dataset import ImageDataset, ImageStore
from psm.data.materialize import Materialized, PixelSource, materialize
from psm.data.names import FileNames, printable
from psm.data.splits import limit_indices
from psm.utils.errors import UserError
from psm.utils.indices import evenly_spaced

_SIZE_SAMPLE = 200  # files whose size is read
_FILES_PER_TASK = 8  # files a thread takes at a time: small images decode faster than they are handed over


@dataclass(frozen=True)
class File:
    """An image file: its path below the data folder, and what tells whether it has changed."""

    path: str
    bytes: int
    changed: int


@dataclass(frozen=True)
class FileSplit:
    """The files of one split, with labels int64 (N,) where there are any."""

    files: list[File]
    labels: np.ndarray | None = None

    def take(self, indices: np.ndarray) -> "FileSplit":
        """The files at these indices."""
        return FileSplit([self.files[i] for i in indices], None if self.labels is None else self.labels[indices])


def list_files(root: Path, below: str = "") -> list[File]:
    """Every image file below ``root/below``, sorted by path. Paths are relative to ``root``.

    Hidden files and other extensions are ignored. Links are followed, but each real folder is read once, so that
    circular links end.
    """
    files: list[File] = []
    waiting, seen = [below], set()
    while waiting:
        folder = waiting.pop()
        try:
            identity = (root / folder).stat()
            entries = sorted(os.scandir(root / folder), key=lambda entry: entry.name)
        except OSError as error:
            raise _unreadable_folder(root / folder, error) from None
        if (identity.st_dev, identity.st_ino) in seen:
            continue
        seen.add((identity.st_dev, identity.st_ino))
        for entry in entries:
            path = f"{folder}/{entry.name}" if folder else entry.name
            if entry.name.startswith("."):
                continue
            if _is_folder(entry):
                waiting.append(path)
            elif Path(entry.name).suffix.lower() in decode.EXTENSIONS:
                files += _file(entry, path)
    return sorted(files, key=lambda file: file.path)


def subfolders(root: Path) -> list[str]:
    """Names of the folders in a folder, sorted, without hidden ones."""
    try:
        with os.scandir(root) as entries:
            return sorted(entry.name for entry in entries if not entry.name.startswith(".") and _is_folder(entry))
    except OSError as error:
        raise _unreadable_folder(root, error) from None


def typical_size(root: Path, files: list[File]) -> int:
    """The default image size: the median shorter side, from 32 to 224, a multiple of 8."""
    sides = []
    with decode.quiet_pillow():
        for index in evenly_spaced(len(files), _SIZE_SAMPLE).tolist():
            try:
                sides.append(decode.shorter_side(root / files[index].path))
            except decode.Unreadable:
                continue
    median = int(np.median(sides)) if sides else 32
    return min(max(median, 32), 224) // 8 * 8


def load_files(
    name: str,
    root: Path,
    train: FileSplit,
    test: FileSplit | None,
    classes: tuple[str, ...],
    size: int,
    config: ImagesConfig,
    progress: bool,
) -> ImageDataset:
    """Decode the files of a data set, leaving out those that cannot be read.

    Args:
        name: of the data set.
        root: the data folder, to which the files' paths are relative.
        train: the training files, of which images.limit keeps some.
        test: the test files.
        classes: names of the labels.
        size: side in pixels to which images are resized.
        config: limit, memory, cache and the allowed fraction of unreadable files.
        progress: whether to show a bar.
    """
    train = train.take(limit_indices(train.labels, len(train.files), config.limit))
    splits = [train] if test is None else [train, test]
    with ThreadPoolExecutor(_num_threads()) as pool, decode.quiet_pillow():
        sources = [_source(name, root, split.files, size, pool) for split in splits]
        results = materialize(sources, config, progress)
    unreadable = tuple(
        (printable(split.files[index].path), reason)
        for split, result in zip(splits, results, strict=True)
        for index, reason in result.failures
    )
    _check_unreadable(root, unreadable, sum(len(split.files) for split in splits), config)
    stores = [_store(split, result) for split, result in zip(splits, results, strict=True)]
    if any(len(images) == 0 for images in stores):
        raise UserError(f"A split of {printable(root)} has no readable image at all; replace its files.")
    return ImageDataset(name, stores[0], stores[1] if test is not None else None, classes, unreadable)


def _is_folder(entry: os.DirEntry[str]) -> bool:
    """True for a folder or a link to one; False for a link that cannot be followed, such as one to itself."""
    try:
        return entry.is_dir()
    except OSError:
        return False


def _file(entry: os.DirEntry[str], path: str) -> list[File]:
    """The file, or nothing for a pipe or device, which would block when read."""
    try:
        status = entry.stat()
    except OSError:  # a broken link: listed, and reported as unreadable when it is decoded
        return [File(path, 0, 0)]
    return [File(path, status.st_size, status.st_mtime_ns)] if entry.is_file() else []


def _unreadable_folder(folder: Path, error: OSError) -> UserError:
    if isinstance(error, FileNotFoundError):
        return UserError(f"The folder {printable(folder)} does not exist any more; it was deleted while it was read.")
    return UserError(f"The folder {printable(folder)} cannot be read ({error.strerror}).")


def _num_threads() -> int:
    # Decoding releases the interpreter's lock, so that threads are enough.
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _source(name: str, root: Path, files: list[File], size: int, pool: ThreadPoolExecutor) -> PixelSource:
    """The images of some files, decoded by the threads of a pool."""

    def decode_files(few: list[File]) -> list[np.ndarray | str]:
        return [_decode(root / file.path, size) for file in few]

    def read(start: int, stop: int) -> tuple[np.ndarray, list[Failure]]:
        tasks = [files[i : min(i + _FILES_PER_TASK, stop)] for i in range(start, stop, _FILES_PER_TASK)]
        results = [result for task in pool.map(decode_files, tasks) for result in task]
        pixels = [result for result in results if not isinstance(result, str)]
        failures = [(start + i, result) for i, result in enumerate(results) if isinstance(result, str)]
        return (np.stack(pixels) if pixels else np.empty((0, 3, size, size), dtype=np.uint8)), failures

    return PixelSource(f"reading {name}", len(files), size, _fingerprint(root, files, size), read)


def _decode(path: Path, size: int) -> np.ndarray | str:
    """The image, or the reason why it cannot be read."""
    try:
        return decode.decode(path, size)
    except decode.Unreadable as error:
        return printable(str(error))


def _fingerprint(root: Path, files: list[File], size: int) -> str:
    """A digest of everything that the pixels depend on."""
    digest = hashlib.sha256(f"files {decode.VERSION} {size}\0".encode() + os.fsencode(root.resolve()))
    for file in files:
        digest.update(os.fsencode(file.path) + f"\0{file.bytes} {file.changed}\0".encode())
    return digest.hexdigest()[:32]


def _store(split: FileSplit, result: Materialized) -> ImageStore:
    """The readable images of a split with their labels and names."""
    readable = split.take(result.readable(len(split.files)))
    labels = None if readable.labels is None else torch.from_numpy(readable.labels)
    return ImageStore(result.pixels, labels, FileNames(file.path for file in readable.files))


def _check_unreadable(root: Path, unreadable: tuple[tuple[str, str], ...], count: int, config: ImagesConfig) -> None:
    """Refuse a folder that was deleted, or with more unreadable files than images.max_unreadable allows."""
    if len(unreadable) <= config.max_unreadable * count and len(unreadable) < count:
        return
    if not root.is_dir():
        raise _unreadable_folder(root, FileNotFoundError())
    first = "; ".join(f"{file} ({reason})" for file, reason in unreadable[:3])
    more = f"; and {len(unreadable) - 3:,} more" if len(unreadable) > 3 else ""
    raise UserError(
        f"{len(unreadable):,} of {count:,} images in {printable(root)} cannot be read, more than "
        f"images.max_unreadable={config.max_unreadable:g} allows: {first}{more}. "
        "Remove or replace them, or raise images.max_unreadable."
    )
