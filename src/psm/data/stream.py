"""The images of a data set one after another: decoded when they are read and held nowhere.

For work that needs every image once. Images are decoded at the size asked for; the cache of the training images is
neither read nor built, and what cannot be read is left out rather than replaced.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from psm.config.schema import ImagesConfig
from psm.config.values import check_values
from psm.data import decode, download, file_list, hugging_face, image_folder, tiny_imagenet
from psm.data.cache import Failure
from psm.data.dataset import ImageDataset, ImageStore
from psm.data.factory import find_published, is_list, joined_files, load_dataset
from psm.data.image_files import FileSet, FileSplit, ImageDecoder, decode_files, fingerprint, typical_size
from psm.data.names import FileNames, printable
from psm.data.registry import ARCHIVES, NAMES
from psm.data.shard_files import is_shards
from psm.data.splits import limit_indices
from psm.utils.devices import idle_threads_sleep, num_cores

NAMES_AT_ONCE = 4096
_SAMPLE = 64  # images of a loaded data set that its fingerprint depends on

Read = Callable[[np.ndarray], tuple[np.ndarray, list[Failure]]]


@dataclass(frozen=True)
class ImageStream:
    """Every image of a data set, training and test images alike, in a fixed order."""

    name: str
    root: Path | None  # the folder that the names are relative to, where images are files below one folder
    size: int  # side in pixels
    names: Sequence[str]
    labels: np.ndarray | None  # int64 (N,), -1 where unknown
    classes: tuple[str, ...]
    fingerprint: str  # of what the pixels depend on
    read: Read
    """Images at some indices: uint8 (n, 3, size, size) of those that can be read, and the failures by index."""
    left_out: tuple[tuple[str, str], ...] = ()  # (path, reason) of images that could not be read when data was loaded

    def __len__(self) -> int:
        return len(self.names)

    def path(self, index: int) -> str:
        """The image's path relative to the data, as printable text."""
        return printable(self.names[index])

    def paths(self, rows: np.ndarray) -> Iterator[str]:
        """Paths of images (N,) in ascending order; many at a time, which is faster than one by one."""
        for some in np.array_split(rows, max(1, -(-len(rows) // NAMES_AT_ONCE))):
            if len(some) and some[-1] - some[0] == len(some) - 1:
                yield from map(printable, self.names[int(some[0]) : int(some[-1]) + 1])
            else:
                yield from map(self.path, some.tolist())


@dataclass(frozen=True)
class _FoundFiles:
    """Data that consists of image files."""

    name: str
    root: Path | None
    split: FileSplit
    classes: tuple[str, ...]


@contextmanager
def image_stream(
    data: str | Path | Sequence[str] | ImageDataset,
    config: ImagesConfig,
    progress: bool = True,
    size: int | None = None,
) -> Iterator[ImageStream]:
    """Open the images of a data set.

    Args:
        data: whatever `psm pretrain` takes, or a loaded data set.
        config: ``limit`` counts training and test images together.
        progress: whether to show a bar where a data set has to be loaded.
        size: side in pixels; None: ``config.size``, or the data set's own.
    """
    check_values(config, "images.")
    if isinstance(data, ImageDataset):
        yield _of_dataset(data, config.limit)
        return
    sources = [str(data)] if isinstance(data, (str, Path)) else [str(source) for source in data]
    with ThreadPoolExecutor(num_cores()) as pool, decode.quiet_pillow():
        if len(sources) == 1 and sources[0].startswith(hugging_face.PREFIX):
            stream = _of_hugging_face(sources[0], config, size or config.size, pool)
        elif (found := _find_files(sources, config, progress)) is not None:
            kept = limit_indices(found.split.labels, len(found.split.files), config.limit)
            stream = _of_files(found, found.split.take(kept), size or config.size, config, pool)
        else:
            yield _of_dataset(load_dataset(sources if len(sources) > 1 else sources[0], config, progress), config.limit)
            return
        with idle_threads_sleep():
            yield stream


def _find_files(sources: list[str], config: ImagesConfig, progress: bool) -> _FoundFiles | None:
    """Data that consists of image files; None for other data, which is loaded."""
    if any(source not in NAMES and is_shards(source) for source in sources):
        return None
    if len(sources) > 1:
        return _whole_set(joined_files(sources, config))
    (data,) = sources
    if data == "tiny-imagenet":
        root = Path(config.root).expanduser()
        if tiny_imagenet.find(root) is None:
            download.install(ARCHIVES[data], root, progress, config.download)
        folder = tiny_imagenet.find(root)
        return None if folder is None else _FoundFiles(data, folder, *tiny_imagenet.every_file(folder, config))
    path = Path(data).expanduser()
    if data in NAMES:
        return None
    if is_list(path):
        return _whole_set(file_list.scan(path, config))
    if not path.is_dir():
        return None
    folder, layout = find_published(path)
    if layout == "tiny-imagenet":
        return _FoundFiles(layout, folder, *tiny_imagenet.every_file(folder, config))
    if layout is not None:
        return None
    return _FoundFiles(path.resolve().name, path, *image_folder.every_file(path, config))


def _whole_set(data: FileSet) -> _FoundFiles:
    """The training and the test files of a set as one."""
    if data.test is None:
        return _FoundFiles(data.name, None, data.train, data.classes)
    files = type(data.train.files).join([data.train.files, data.test.files])
    known = [split.labels for split in (data.train, data.test) if split.labels is not None]
    labels = np.concatenate(known) if len(known) == 2 else None
    return _FoundFiles(data.name, None, FileSplit(files, labels), data.classes if labels is not None else ())


def _of_files(
    found: _FoundFiles, split: FileSplit, size: int | None, config: ImagesConfig, pool: ThreadPoolExecutor
) -> ImageStream:
    side = size or config.side(typical_size(split.files))
    decoder = ImageDecoder(side, whole=False)

    def read(indices: np.ndarray) -> tuple[np.ndarray, list[Failure]]:
        pixels, failures = decode_files(split.files, indices.tolist(), decoder, pool)
        return np.asarray(pixels), [(int(indices[place]), reason) for place, reason in failures]

    return ImageStream(
        found.name,
        found.root,
        side,
        FileNames(split.files.names()),
        split.labels,
        found.classes,
        fingerprint(split.files, decoder),
        read,
    )


def _of_hugging_face(source: str, config: ImagesConfig, size: int | None, pool: ThreadPoolExecutor) -> ImageStream:
    """The images of a dataset of Hugging Face: those for training, then those for testing."""
    train, test, classes = hugging_face.scan(source, config)
    splits = [train] if test is None else [train, test]
    decoder = ImageDecoder(size or config.side(hugging_face.typical_size(train)), whole=False)
    known = [split.labels for split in splits if split.labels is not None]
    labels = np.concatenate(known) if len(known) == len(splits) else None
    kept = limit_indices(labels, sum(len(split.rows) for split in splits), config.limit)
    starts = np.cumsum([0, *(len(split.rows) for split in splits)])

    def read(indices: np.ndarray) -> tuple[np.ndarray, list[Failure]]:
        rows = kept[indices]
        contents: list[bytes] = [b""] * len(rows)
        for start, split in zip(starts, splits, strict=False):
            places = np.flatnonzero((rows >= start) & (rows < start + len(split.rows)))
            some = split.take(rows[places] - start)
            for place, content in zip(places.tolist(), some.contents(0, len(places)), strict=True):
                contents[place] = content
        pixels, failures = decoder.collect(list(pool.map(decoder, contents)), 0)
        return np.asarray(pixels), [(int(indices[place]), reason) for place, reason in failures]

    names = [split.name(row) for split in splits for row in range(len(split.rows))]
    digest = hashlib.sha256(f"{[split.fingerprint for split in splits]} {decoder}".encode() + kept.tobytes())
    return ImageStream(
        source.removeprefix(hugging_face.PREFIX).partition(":")[0].rstrip("/").rpartition("/")[2],
        None,
        decoder.size,
        FileNames(names[row] for row in kept.tolist()),
        None if labels is None else labels[kept],
        classes if labels is not None else (),
        digest.hexdigest()[:32],
        read,
    )


def _of_dataset(data: ImageDataset, limit: int | None) -> ImageStream:
    """The images of a loaded data set: those for training, then those for testing."""
    stores = [data.train] if data.test is None else [data.train, data.test]
    titles = ["train", "test"][: len(stores)]
    names = [name for title, store in zip(titles, stores, strict=True) for name in _names(store, title)]
    known = [store.labels if store.labels is not None else torch.full((len(store),), -1) for store in stores]
    labels = torch.cat(known).numpy() if data.classes or any(store.labels is not None for store in stores) else None
    kept = limit_indices(labels, len(names), limit)
    starts = np.cumsum([0, *map(len, stores)])

    def read(indices: np.ndarray) -> tuple[np.ndarray, list[Failure]]:
        rows = kept[indices]
        pixels = np.empty((len(rows), *data.train.shape), dtype=np.uint8)
        failures: dict[int, str] = {}
        for start, store in zip(starts, stores, strict=False):
            places = np.flatnonzero((rows >= start) & (rows < start + len(store)))
            found, failed = store.take_readable(torch.from_numpy(rows[places] - start))
            reasons = {int(places[place]): reason for place, reason in failed}
            pixels[[place for place in places.tolist() if place not in reasons]] = found.numpy()
            failures |= reasons
        readable = [place for place in range(len(rows)) if place not in failures]
        found_failures = [(int(indices[place]), reason) for place, reason in sorted(failures.items())]
        return (pixels if len(readable) == len(rows) else pixels[readable]), found_failures

    digest = hashlib.sha256(f"{data.name} {[(len(store), *store.shape) for store in stores]} {limit}".encode())
    sampled = [store.take_readable(store.sample(_SAMPLE))[0].numpy().tobytes() for store in stores]
    digest.update(b"".join(sampled))
    if labels is not None:
        digest.update(labels.tobytes())
    return ImageStream(
        data.name,
        None,
        data.size,
        FileNames(names[index] for index in kept.tolist()),
        None if labels is None else labels[kept],
        data.classes,
        digest.hexdigest()[:32],
        read,
        data.unreadable,
    )


def _names(store: ImageStore, split: str) -> Sequence[str]:
    return [f"{split}/{index}" for index in range(len(store))] if store.names is None else store.names
