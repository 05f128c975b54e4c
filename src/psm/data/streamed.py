"""Images that are read from shards and decoded each time they are needed."""

import logging
import math
import os
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from psm.config.schema import ImagesConfig
from psm.data import decode
from psm.data.crops import CropDraws
from psm.data.names import FileNames, printable
from psm.data.shard_cache import Prefetcher, Shard, ShardCache
from psm.data.shard_files import ShardError
from psm.data.shard_index import WINDOW, SampleTable
from psm.data.shard_order import ShardOrder
from psm.data.unreadable import too_many_unreadable
from psm.utils.devices import num_cores
from psm.utils.errors import UserError
from psm.utils.indices import evenly_spaced

log = logging.getLogger("psm")

SAMPLED_SHARDS = 8  # from which a sample of a set is taken: not all of them have to be fetched
_SHOWN = 10  # unreadable images that are logged one by one
_NEAREST = 50  # images of the same shard that are tried in place of an unreadable one

Decode = Callable[[bytes], np.ndarray]


@dataclass
class Failures:
    """What could not be read: single images, and whole shards with the number of their images."""

    images: dict[int, str] = field(default_factory=dict)  # id: reason
    shards: dict[int, str] = field(default_factory=dict)  # shard: reason

    def __bool__(self) -> bool:
        return bool(self.images or self.shards)


class StreamedImages:
    """uint8 images (N, 3, size, size) from shards; ``crops`` gives parts of the whole images instead.

    An image that cannot be decoded is replaced by the nearest one of its shard that can. Of a shard that cannot be
    read, each image is replaced by one of another shard of the same window. How many are unreadable is counted, and
    more than images.max_unreadable are refused.
    """

    dtype = np.dtype(np.uint8)
    decoded = False

    def __init__(
        self,
        shards: Sequence[Shard],
        table: SampleTable,
        names: FileNames,
        size: int,
        cache: ShardCache,
        config: ImagesConfig,
    ):
        self.shards, self.table, self.names, self.size = tuple(shards), table, names, size
        self.cache, self.config = cache, config
        self.shape = (len(table), 3, size, size)
        self.starts = np.searchsorted(table.shard, np.arange(len(self.shards) + 1))  # (shards + 1,)
        self.failures = Failures()
        self._open = _OpenFiles(self.shards, cache)
        self._prefetcher: Prefetcher | None = None

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, index: int) -> np.ndarray:
        return self.take_batch(np.array([index]))[0]

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_open": None, "_prefetcher": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._open = _OpenFiles(self.shards, self.cache)

    @property
    def counts(self) -> np.ndarray:
        """Images of each shard, (shards,)."""
        return np.diff(self.starts)

    def select(self, rows: np.ndarray) -> "StreamedImages":
        """The images at these rows, which ascend."""
        names = FileNames(self.names[row] for row in rows.tolist())
        return StreamedImages(self.shards, self.table.take(rows), names, self.size, self.cache, self.config)

    def sample(self, most: int) -> np.ndarray:
        """At most so many ids, spread over a few shards, ascending."""
        filled = np.flatnonzero(self.counts)
        chosen = filled[evenly_spaced(len(filled), SAMPLED_SHARDS).numpy()]
        ids = np.concatenate([np.arange(self.starts[shard], self.starts[shard + 1]) for shard in chosen])
        return ids[evenly_spaced(len(ids), most).numpy()]

    def order(self, seed: int, epoch: int) -> ShardOrder:
        """The order of an epoch."""
        return ShardOrder(self.starts, self.config.window or WINDOW, seed, epoch)

    def check_ahead(self, ahead: int) -> None:
        """Refuse a cache that is too small for the shards of two windows and of so many images ahead."""
        typical = max(1.0, float(self.counts[self.counts > 0].mean()))
        window = self.config.window or WINDOW
        self.cache.check_bound(self.shards, max(2 * window, window + 1 + math.ceil(ahead / typical)))

    def fetch(self, order: ShardOrder, window: int, ahead: int) -> None:
        """Fetch the shards of a window, of the next and of so many images ahead, and drop all others."""
        last = max(window + 1, order.window_of(int(order.ends[window]) + ahead))
        numbers = [number for group in order.windows[window : last + 1] for number in group.tolist()]
        shards = [self.shards[number] for number in numbers]
        self._prefetcher = self._prefetcher or Prefetcher(self.cache)
        self._prefetcher.want(shards)  # first: what it has not begun of an earlier window is not needed any more
        self.cache.need(shards)

    def close(self) -> None:
        """End fetching."""
        if self._prefetcher is not None:
            self._prefetcher.close()
            self._prefetcher = None

    def take_batch(self, ids: np.ndarray) -> np.ndarray:
        """Center squares of images, (B, 3, size, size). In place of an unreadable one stands one of its class."""
        order = np.argsort(ids, kind="stable")  # forwards through the shards
        labels = self.table.label if len(self.table) and self.table.label[0] >= 0 else None
        batch = np.empty((len(ids), *self.shape[1:]), dtype=np.uint8)
        failures = Failures()

        shards = np.unique(self.table.shard[ids])

        def square(content: bytes) -> np.ndarray:
            return decode.decode(content, self.size)

        def read(row: int) -> None:
            batch[row], _ = self._read(int(ids[row]), square, shards, failures, labels)

        with decode.quiet_pillow(), ThreadPoolExecutor(num_cores()) as pool:
            list(pool.map(read, order.tolist()))
        self.report(failures)
        return batch

    def take_exact(self, ids: np.ndarray) -> tuple[np.ndarray, list[tuple[int, str]]]:
        """Center squares of the images that can be read; of the others the place among the ids and the reason."""

        def read(index: int) -> np.ndarray | str:
            try:
                return decode.decode(self._content(index), self.size)
            except (decode.Unreadable, ShardError) as error:
                return printable(str(error))

        with decode.quiet_pillow(), ThreadPoolExecutor(num_cores()) as pool:
            results = list(pool.map(read, ids.tolist()))
        pixels = [result for result in results if not isinstance(result, str)]
        failures = [(place, result) for place, result in enumerate(results) if isinstance(result, str)]
        return (np.stack(pixels) if pixels else np.empty((0, *self.shape[1:]), dtype=np.uint8)), failures

    def crops(
        self, ids: np.ndarray, draws: CropDraws, size: int, window: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, Failures]:
        """Crops of whole images.

        Args:
            ids: (B,).
            draws: of these images.
            size: side of the crops.
            window: the shards whose images may stand in for unreadable ones.

        Returns:
            Crops uint8 (V, B, 3, size, size), the ids of the images that they are of, and what could not be read.
        """
        failures, used = Failures(), ids.copy()
        batch = np.empty((len(draws.scale), len(ids), 3, size, size), dtype=np.uint8)
        with decode.quiet_pillow():
            for row, index in enumerate(ids.tolist()):

                def crop(content: bytes, row: int = row) -> np.ndarray:
                    return decode.decode_crops(content, lambda height, width: draws.boxes(row, height, width), size)

                batch[:, row], used[row] = self._read(index, crop, window, failures)
        return batch, used, failures

    def header_sides(self, most: int) -> list[int]:
        """Shorter sides of some images, in pixels."""
        sides = []
        with decode.quiet_pillow():
            for index in self.sample(most).tolist():
                try:
                    sides.append(decode.shorter_side(self._content(index)))
                except (decode.Unreadable, ShardError):
                    continue
        return sides

    def report(self, failures: Failures) -> None:
        """Count what could not be read; refuse the set once it is too much.

        Args:
            failures: of this or of a worker process.
        """
        for shard, reason in failures.shards.items():
            if shard not in self.failures.shards:
                self.failures.shards[shard] = reason
                address, count = printable(self.shards[shard].address), int(self.counts[shard])
                log.warning("the shard %s cannot be read: %s; other images stand in for %d.", address, reason, count)
        for index, reason in failures.images.items():
            if index not in self.failures.images:
                self.failures.images[index] = reason
                if len(self.failures.images) <= _SHOWN:
                    log.warning("%s cannot be read: %s; another image stands in for it.", self._name(index), reason)
        if failures:
            self._refuse_too_many()

    @property
    def unreadable(self) -> tuple[tuple[str, str], ...]:
        """What could not be read so far, with the reasons."""
        shards = [(printable(self.shards[shard].address), why) for shard, why in self.failures.shards.items()]
        return (*shards, *((self._name(index), why) for index, why in self.failures.images.items()))

    def _refuse_too_many(self) -> None:
        lost = sum(int(self.counts[shard]) for shard in self.failures.shards)
        lost += sum(self.table.shard[index] not in self.failures.shards for index in self.failures.images)
        if lost > self.config.max_unreadable * len(self) or lost == len(self):
            raise UserError(too_many_unreadable(self.unreadable, len(self), "the shards", self.config, lost))

    def _name(self, index: int) -> str:
        return printable(f"{self.shards[self.table.shard[index]].address}/{self.names[index]}")

    def _read(
        self, index: int, read: Decode, window: np.ndarray, failures: Failures, labels: np.ndarray | None = None
    ) -> tuple[np.ndarray, int]:
        """What ``read`` makes of an image's content, and the id of the image: another where this one is unreadable."""
        for candidate in (index, *self._others(index, window, labels)):
            shard = int(self.table.shard[candidate])
            if shard in failures.shards or shard in self.failures.shards:
                failures.shards.setdefault(shard, self.failures.shards.get(shard, ""))
                continue
            try:
                return read(self._content(candidate)), candidate
            except decode.Unreadable as error:
                failures.images[candidate] = printable(str(error))
            except ShardError as error:
                failures.shards[shard] = str(error)
        reasons = [*failures.shards.values(), *failures.images.values()]
        raise UserError(f"no image of {len(window):,} shards in use can be read: {reasons[0] if reasons else ''}.")

    def _others(self, index: int, window: np.ndarray, labels: np.ndarray | None) -> Iterable[int]:
        """Images that may stand in for one: near ones of its shard, then ones of the window's other shards."""
        shard = int(self.table.shard[index])
        first, last = int(self.starts[shard]), int(self.starts[shard + 1])
        near = np.arange(max(first, index - _NEAREST), min(last, index + _NEAREST + 1))
        near = near[near != index]
        near = near[np.argsort(np.abs(near - index), kind="stable")]
        if labels is not None:
            near = near[np.argsort(labels[near] != labels[index], kind="stable")]
        yield from near.tolist()
        place = np.flatnonzero(window == shard)
        turned = np.roll(window, -int(place[0]) - 1) if len(place) else window
        for other in turned.tolist():
            count = int(self.counts[other])
            if other != shard and count:
                yield int(self.starts[other]) + (index - first) % count

    def _content(self, index: int) -> bytes:
        """The bytes of an image's file."""
        row = self.table
        return self._open.read(int(row.shard[index]), int(row.offset[index]), int(row.bytes[index]))


class _OpenFiles:
    """The shards that this process has open; each is opened when it is first read."""

    MOST = 64

    def __init__(self, shards: Sequence[Shard], cache: ShardCache):
        self.shards, self.cache = shards, cache
        self._files: OrderedDict[int, Any] = OrderedDict()
        self._process = os.getpid()

    def read(self, shard: int, offset: int, count: int) -> bytes:
        """Some bytes of a shard."""
        if self._process != os.getpid():  # a fork: the place in a shared file would be shared
            self._files, self._process = OrderedDict(), os.getpid()
        file = self._files.get(shard)
        if file is None:
            file = self.cache.reading(self.shards[shard], lambda path: path.open("rb"))
            self._files[shard] = file
            while len(self._files) > self.MOST:
                self._files.popitem(last=False)
        try:
            content = os.pread(file.fileno(), count, offset) if hasattr(os, "pread") else _read_at(file, offset, count)
        except OSError as error:
            raise ShardError(error.strerror or str(error)) from None
        if len(content) < count:
            raise ShardError(f"cut off at byte {offset + len(content):,}")
        return content


def _read_at(file: Any, offset: int, count: int) -> bytes:
    file.seek(offset)
    return file.read(count)
