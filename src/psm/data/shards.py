"""Data sets of shards: tar files in WebDataset's layout, local or remote, read by an index."""

from collections.abc import Sequence
from re import split as words_of

import numpy as np
import torch

from psm.config.schema import ImagesConfig
from psm.data.cache import cache_folder
from psm.data.dataset import ImageDataset, ImageStore
from psm.data.image_files import rounded_size
from psm.data.names import FileNames
from psm.data.shard_cache import ShardCache
from psm.data.shard_files import read_beside, shard_addresses
from psm.data.shard_index import ShardIndex, build_index
from psm.data.splits import TEST_NAMES, held_out_mask, limit_indices
from psm.data.streamed import StreamedImages
from psm.utils.errors import UserError

SHARD_CACHE = 20.0  # GB of copies of remote shards
CLASSES_FILE = "classes.txt"
_SIZE_SAMPLE = 200  # images whose size is read


def load(sources: Sequence[str], config: ImagesConfig, progress: bool) -> ImageDataset:
    """The images of shards, with labels where every image has one.

    Shards with the word test, val, valid or validation in their file names are the test split.
    """
    addresses = [address for source in sources for address in shard_addresses(source)]
    folder = cache_folder(config)
    cache = ShardCache(folder / "shards", (config.shard_cache or SHARD_CACHE) * 1e9)
    index = build_index(addresses, cache, folder, config, progress)
    name = _set_name(sources[0])
    labels = None if config.labels == "none" or (index.table.label < 0).any() else index.table.label
    if labels is None and config.labels == "subfolder":
        raise UserError("images.labels=subfolder needs a label for every image: some have no .cls in their shards.")
    train, test = _splits(index, labels, config)
    if labels is None:
        test = None
    classes = _class_names(addresses, labels)
    kept = limit_indices(None if labels is None else labels[train], len(train), config.limit)
    train = train[kept]
    size = config.size
    if size is None:
        size = config.side(rounded_size(_streamed(index, train, 32, cache, config).header_sides(_SIZE_SAMPLE)))
    stores = []
    for rows in (train, test) if test is not None else (train,):
        images = _streamed(index, rows, size, cache, config)
        stores.append(ImageStore(images, None if labels is None else torch.from_numpy(labels[rows]), images.names))
    return ImageDataset(name, stores[0], stores[1] if test is not None else None, classes, index.unreadable)


def _splits(index: ShardIndex, labels: np.ndarray | None, config: ImagesConfig) -> tuple[np.ndarray, np.ndarray | None]:
    """Rows of the training and the test images."""
    is_test = np.array([_is_test(shard.address) for shard in index.shards])
    rows = np.arange(len(index.table))
    if is_test.any() and not is_test.all():
        held = is_test[index.table.shard]
        return rows[~held], rows[held]
    if labels is None or len(np.unique(labels)) < 2:
        return rows, None
    held = held_out_mask(labels, config.test_share)
    return (rows[~held], rows[held]) if held.any() else (rows, None)


def _is_test(address: str) -> bool:
    return any(word in TEST_NAMES for word in words_of(r"[^a-z]+", address.rpartition("/")[2].lower()))


def _streamed(
    index: ShardIndex, rows: np.ndarray, size: int, cache: ShardCache, config: ImagesConfig
) -> StreamedImages:
    names = FileNames(index.names[row] for row in rows.tolist())
    return StreamedImages(index.shards, index.table.take(rows), names, size, cache, config)


def _class_names(addresses: Sequence[str], labels: np.ndarray | None) -> tuple[str, ...]:
    """Names from classes.txt beside the first shard where they fit, else numbers."""
    if labels is None:
        return ()
    count = int(labels.max()) + 1
    content = read_beside(addresses[0], CLASSES_FILE)
    names = content.decode("utf-8", "replace").splitlines() if content else []
    if len(names) >= count:
        return tuple(names)
    return tuple(str(number) for number in range(count))


def _set_name(source: str) -> str:
    """A name for the set: that of the folder around its shards."""
    parts = [part for part in source.split("/") if part]
    return (parts[-2] if len(parts) > 1 and ".tar" in parts[-1] else parts[-1]) if parts else source
