"""The images of a data set one after another: decoded when they are read and held nowhere.

For work that needs every image once. Files are decoded at the size asked for, and the cache of the training images is
neither read nor built.
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
from psm.data import decode, download, image_folder, tiny_imagenet
from psm.data.cache import Failure
from psm.data.dataset import ImageDataset, ImageStore
from psm.data.factory import find_published, load_dataset
from psm.data.image_files import FileSplit, ImageDecoder, decode_files, fingerprint, typical_size
from psm.data.names import FileNames, printable
from psm.data.registry import ARCHIVES
from psm.data.splits import limit_indices
from psm.utils.devices import num_cores
from psm.utils.indices import evenly_spaced

_SAMPLE = 64  # images of a loaded data set that its fingerprint depends on


@dataclass(frozen=True)
class ImageStream:
    """Every image of a data set, training and test images alike, in a fixed order."""

    name: str
    root: Path | None  # the folder that the names are relative to, where images are files of their own
    size: int  # side in pixels
    names: Sequence[str]
    labels: np.ndarray | None  # int64 (N,), -1 where unknown
    classes: tuple[str, ...]
    fingerprint: str  # of what the pixels depend on
    read: Callable[[np.ndarray], tuple[np.ndarray, list[Failure]]]
    """Images at some indices: uint8 (n, 3, size, size) of those that can be read, and the failures by index."""

    def __len__(self) -> int:
        return len(self.names)

    def path(self, index: int) -> str:
        """The image's path relative to the data, as printable text."""
        return printable(self.names[index])


@contextmanager
def image_stream(
    data: str | Path | list[str] | ImageDataset, config: ImagesConfig, progress: bool = True, size: int | None = None
) -> Iterator[ImageStream]:
    """Open the images of a data set.

    Args:
        data: whatever `psm pretrain` takes, or a loaded data set.
        config: ``limit`` counts training and test images together.
        progress: whether to show a bar where a data set has to be loaded.
        size: side in pixels; None: ``config.size``, or the data set's own.
    """
    check_values(config, "images.")
    found = _find_files(str(data), config, progress) if isinstance(data, (str, Path)) else None
    if found is None:
        loaded = data if isinstance(data, ImageDataset) else load_dataset(data, config, progress)
        yield _of_dataset(loaded, config.limit)
        return
    name, root, files, classes = found
    files = files.take(limit_indices(files.labels, len(files.files), config.limit))
    side = size or config.size or config.side(typical_size(files.files))
    with ThreadPoolExecutor(num_cores()) as pool, decode.quiet_pillow():
        yield _of_files(name, root, files, classes, side, pool)


def _find_files(data: str, config: ImagesConfig, progress: bool) -> tuple[str, Path, FileSplit, tuple[str, ...]] | None:
    """Name, folder, files and class names of data that consist of image files; None for other data."""
    if data == "tiny-imagenet":
        root = Path(config.root).expanduser()
        if tiny_imagenet.find(root) is None:
            download.install(ARCHIVES[data], root, progress, config.download)
        folder = tiny_imagenet.find(root)
        return None if folder is None else (data, folder, *tiny_imagenet.every_file(folder, config))
    path = Path(data).expanduser()
    if data in (*ARCHIVES, "shapes") or not path.is_dir():
        return None
    folder, layout = find_published(path)
    if layout == "tiny-imagenet":
        return layout, folder, *tiny_imagenet.every_file(folder, config)
    return None if layout is not None else (path.resolve().name, path, *image_folder.every_file(path, config))


def _of_files(
    name: str, root: Path, split: FileSplit, classes: tuple[str, ...], size: int, pool: ThreadPoolExecutor
) -> ImageStream:
    names = FileNames(split.files.paths)
    decoder = ImageDecoder(size, whole=False)

    def read(indices: np.ndarray) -> tuple[np.ndarray, list[Failure]]:
        pixels, failures = decode_files(split.files, indices.tolist(), decoder, pool)
        return np.asarray(pixels), [(int(indices[place]), reason) for place, reason in failures]

    return ImageStream(name, root, size, names, split.labels, classes, fingerprint(split.files, decoder), read)


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
        for start, store in zip(starts, stores, strict=False):
            here = (rows >= start) & (rows < start + len(store))
            if here.all():  # the usual case, without a copy
                return store.take(torch.from_numpy(rows - start)).numpy(), []
            pixels[here] = store.take(torch.from_numpy(rows[here] - start)).numpy()
        return pixels, []

    digest = hashlib.sha256(f"{data.name} {[(len(store), *store.shape) for store in stores]} {limit}".encode())
    digest.update(read(evenly_spaced(len(kept), _SAMPLE).numpy())[0].tobytes())
    if labels is not None:
        digest.update(labels.tobytes())
    return ImageStream(
        data.name,
        None,
        data.size,
        [names[index] for index in kept.tolist()],
        None if labels is None else labels[kept],
        data.classes,
        digest.hexdigest()[:32],
        read,
    )


def _names(store: ImageStore, split: str) -> Sequence[str]:
    return [f"{split}/{index}" for index in range(len(store))] if store.names is None else store.names
