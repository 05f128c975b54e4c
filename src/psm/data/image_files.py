"""Image files as a data set: their splits and classes, and decoding them in parallel."""

import hashlib
import logging
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from psm.config.keys import listed
from psm.config.schema import ImagesConfig
from psm.data import decode
from psm.data.cache import Failure
from psm.data.dataset import ImageDataset, ImageStore
from psm.data.file_index import Files, unreadable_folder
from psm.data.materialize import Materialized, PixelSource, materialize
from psm.data.names import FileNames, printable
from psm.data.splits import held_out_mask, limit_indices
from psm.data.unreadable import too_many_unreadable
from psm.data.whole_images import held_size
from psm.utils.devices import num_cores
from psm.utils.errors import UserError
from psm.utils.indices import evenly_spaced

log = logging.getLogger("psm")

_SIZE_SAMPLE = 200  # files whose size is read
_FILES_PER_TASK = 8  # files a thread takes at a time: small images decode faster than they are handed over


@dataclass(frozen=True)
class FileSplit:
    """The files of one split, with labels int64 (N,) where there are any."""

    files: Files
    labels: np.ndarray | None = None

    def take(self, indices: np.ndarray) -> "FileSplit":
        """The files at these indices."""
        return FileSplit(self.files.take(indices), None if self.labels is None else self.labels[indices])


@dataclass(frozen=True)
class FileSet:
    """The files of a data set before they are decoded; without ``test``, nothing is held out yet."""

    name: str
    train: FileSplit
    test: FileSplit | None = None
    classes: tuple[str, ...] = ()

    @property
    def unlabeled(self) -> "FileSet":
        """All training files, without labels."""
        return FileSet(self.name, FileSplit(self.train.files))

    def hold_out(self, config: ImagesConfig) -> "FileSet":
        """With a test split: images.test_share of every class where the source has labels and no test split."""
        if self.train.labels is None or self.test is not None:
            return self
        held_out = held_out_mask(self.train.labels, config.test_share)
        if not held_out.any():  # a class for every single image is no class
            return self.unlabeled
        train, test = (self.train.take(np.flatnonzero(mask)) for mask in (~held_out, held_out))
        return FileSet(self.name, train, test, self.classes)


def number_classes(names: Sequence[str], classes: Sequence[str]) -> np.ndarray:
    """Class names as labels int64 (N,)."""
    number = {name: index for index, name in enumerate(classes)}
    return np.array([number[name] for name in names], dtype=np.int64)


def join_sets(sets: Sequence[FileSet]) -> FileSet:
    """Several sources as one data set. Classes of the same name are one class.

    Labels are kept where every source has them. Where a source has a test split of its own, these are the test images.
    """
    if len(sets) == 1:
        return sets[0]
    name = "+".join(source.name for source in sets)
    unlabeled = [source.name for source in sets if source.train.labels is None]
    if unlabeled:
        if len(unlabeled) < len(sets):
            log.warning("%s: no labels in %s, so those of the others are ignored.", name, listed(unlabeled))
        return FileSet(name, FileSplit(Files.join([source.train.files for source in sets])))
    classes = tuple(sorted({name for source in sets for name in source.classes}, key=natural))
    tests = [source for source in sets if source.test is not None]
    return FileSet(
        name,
        _joined([(source, source.train) for source in sets], classes),
        _joined([(source, source.test) for source in tests if source.test], classes) if tests else None,
        classes,
    )


def natural(name: str) -> tuple[int, str]:
    """Sorts class names: whole numbers by their value, before text."""
    return (int(name) if name.isascii() and name.isdigit() else 1 << 62, name)


def _joined(parts: list[tuple[FileSet, FileSplit]], classes: tuple[str, ...]) -> FileSplit:
    labels = [number_classes(source.classes, classes)[split.labels] for source, split in parts]
    return FileSplit(Files.join([split.files for _, split in parts]), np.concatenate(labels))


def typical_size(files: Files) -> int:
    """The default image size: the median shorter side, from 32 to 224, a multiple of 8."""
    sides = []
    with decode.quiet_pillow():
        for index in evenly_spaced(len(files), _SIZE_SAMPLE).tolist():
            try:
                sides.append(decode.shorter_side(files.location(index)))
            except decode.Unreadable:
                continue
    return rounded_size(sides)


def rounded_size(sides: list[int]) -> int:
    """The default image size for images with these shorter sides: the median, from 32 to 224, a multiple of 8."""
    median = int(np.median(sides)) if sides else 32
    return min(max(median, 32), 224) // 8 * 8


def load_files(data: FileSet, size: int | None, config: ImagesConfig, progress: bool, shared: bool) -> ImageDataset:
    """Decode the files of a data set, leaving out those that cannot be read.

    Args:
        data: the files; of the training files images.limit keeps some.
        size: side in pixels to which images are resized; None: that of a typical file.
        config: limit, memory, cache and the allowed fraction of unreadable files.
        progress: whether to show a bar.
        shared: whether other processes of this machine load the same.
    """
    size = size or config.side(typical_size(data.train.files))
    data = data.hold_out(config)
    kept = limit_indices(data.train.labels, len(data.train.files), config.limit)
    data = replace(data, train=data.train.take(kept))
    splits = [data.train] if data.test is None else [data.train, data.test]
    with ThreadPoolExecutor(num_cores()) as pool, decode.quiet_pillow():  # decoding releases the interpreter's lock
        decoder = image_decoder(size, config)
        sources = [_source(data.name, split.files, decoder, pool) for split in splits]
        results = materialize(sources, config, progress, shared)
    unreadable = tuple(
        (printable(split.files.name(index)), reason)
        for split, result in zip(splits, results, strict=True)
        for index, reason in result.failures
    )
    _check_unreadable(data, unreadable, sum(len(split.files) for split in splits), config)
    stores = [_store(split, result, size) for split, result in zip(splits, results, strict=True)]
    if any(len(images) == 0 for images in stores):
        raise UserError(f"A split of {_where(data)} has no readable image at all; replace its files.")
    return ImageDataset(data.name, stores[0], stores[1] if data.test is not None else None, data.classes, unreadable)


@dataclass(frozen=True)
class ImageDecoder:
    """Decodes files as they are held: center squares of a size, or whole images with that as their shorter side."""

    size: int
    whole: bool

    def __call__(self, file: Path | bytes) -> np.ndarray | str:
        """The image, or the reason why it cannot be read."""
        try:
            return decode.decode_whole(file, self.size) if self.whole else decode.decode(file, self.size)
        except decode.Unreadable as error:
            return printable(str(error))

    def collect(
        self, results: Sequence[np.ndarray | str], start: int
    ) -> tuple[np.ndarray | list[np.ndarray], list[Failure]]:
        """What ``PixelSource.read`` returns, from the results of files ``start`` and following."""
        pixels = [result for result in results if not isinstance(result, str)]
        failures = [(start + i, result) for i, result in enumerate(results) if isinstance(result, str)]
        if self.whole:
            return pixels, failures
        return (np.stack(pixels) if pixels else np.empty((0, 3, self.size, self.size), dtype=np.uint8)), failures


def image_decoder(size: int, config: ImagesConfig) -> ImageDecoder:
    """The decoder for images of this size."""
    return ImageDecoder(held_size(config, size) if config.whole else size, config.whole)


def _source(name: str, files: Files, decoder: ImageDecoder, pool: ThreadPoolExecutor) -> PixelSource:
    """The images of some files, decoded by the threads of a pool."""

    def read(start: int, stop: int) -> tuple[np.ndarray | list[np.ndarray], list[Failure]]:
        return decode_files(files, range(start, stop), decoder, pool, start)

    digest = fingerprint(files, decoder)
    return PixelSource(f"reading {name}", len(files), decoder.size, digest, read, True, decoder.whole)


def decode_files(
    files: Files, indices: Sequence[int], decoder: ImageDecoder, pool: ThreadPoolExecutor, first: int = 0
) -> tuple[np.ndarray | list[np.ndarray], list[Failure]]:
    """The images of those files that can be read, and the failures, counted from ``first``; a pool's threads decode."""

    def decode_some(some: Sequence[int]) -> list[np.ndarray | str]:
        return [decoder(files.location(index)) for index in some]

    tasks = [indices[start : start + _FILES_PER_TASK] for start in range(0, len(indices), _FILES_PER_TASK)]
    return decoder.collect([result for task in pool.map(decode_some, tasks) for result in task], first)


def fingerprint(files: Files, decoder: ImageDecoder) -> str:
    """A digest of everything that the pixels depend on."""
    digest = hashlib.sha256(f"files {decode.VERSION} {decoder}\0".encode())
    for root in files.roots:
        digest.update(os.fsencode(root.resolve()) + b"\0")
    digest.update(b"\0".join(map(os.fsencode, files.paths)))
    for column in (files.root, files.bytes, files.changed):
        digest.update(np.ascontiguousarray(column).data)
    return digest.hexdigest()[:32]


def _store(split: FileSplit, result: Materialized, size: int) -> ImageStore:
    """The readable images of a split with their labels and names."""
    readable = split.take(result.readable(len(split.files)))
    labels = None if readable.labels is None else torch.from_numpy(readable.labels)
    return ImageStore(result.held(size), labels, FileNames(readable.files.names()))


def _where(data: FileSet) -> str:
    return listed([printable(root) for root in data.train.files.roots]).replace(" or ", " and ")


def _check_unreadable(data: FileSet, unreadable: tuple[tuple[str, str], ...], count: int, config: ImagesConfig) -> None:
    """Refuse a folder that was deleted, or with more unreadable files than images.max_unreadable allows."""
    if len(unreadable) <= config.max_unreadable * count and len(unreadable) < count:
        return
    for root in data.train.files.roots:
        if not root.is_dir():
            raise unreadable_folder(root, FileNotFoundError())
    raise UserError(too_many_unreadable(unreadable, count, _where(data), config))
