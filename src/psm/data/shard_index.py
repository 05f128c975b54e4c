"""The index of a set of shards: every image's name, shard, offset, size and label; built once, cached and checked.

The index of each shard is a file of the cache folder. It is used as long as the shard has the size and version (local
files: the modification time) that it was built from.
"""

import hashlib
import io
import os
import zipfile
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from psm.config.schema import ImagesConfig
from psm.data.names import FileNames, printable
from psm.data.shard_cache import Shard, ShardCache
from psm.data.shard_files import ShardError, ShardStatus, is_remote, shard_status
from psm.data.tar_index import TarIndex, read_tar
from psm.data.unreadable import too_many_unreadable
from psm.utils.errors import UserError
from psm.utils.files import write_atomically
from psm.utils.progress import counting

_VERSION = 1
WINDOW = 8  # shards whose images are mixed
_ASKING, _READING = 16, 2  # threads


@dataclass(frozen=True)
class SampleTable:
    """Where each image of a set is: columns of length N, sorted by shard and offset."""

    shard: np.ndarray  # int32
    offset: np.ndarray  # int64
    bytes: np.ndarray  # int64
    label: np.ndarray  # int64; -1 where there is none

    def __len__(self) -> int:
        return len(self.shard)

    def take(self, indices: np.ndarray) -> "SampleTable":
        """Some of the images."""
        return SampleTable(self.shard[indices], self.offset[indices], self.bytes[indices], self.label[indices])


@dataclass(frozen=True)
class ShardIndex:
    """The images of a set of shards."""

    shards: tuple[Shard, ...]
    table: SampleTable
    names: FileNames
    unreadable: tuple[tuple[str, str], ...]  # damaged shards


def build_index(
    addresses: Sequence[str], cache: ShardCache, folder: Path, config: ImagesConfig, progress: bool
) -> ShardIndex:
    """Index shards, or read their indexes where these are still right.

    Args:
        addresses: of the shards.
        cache: through which remote shards are read.
        folder: of the indexes.
        config: has the allowed fraction of unreadable images.
        progress: whether to show a bar.
    """
    if len(set(addresses)) < len(addresses):
        repeated, _ = Counter(addresses).most_common(1)[0]
        raise UserError(f"the shard {printable(repeated)} is named twice: give each once.")

    def ask(address: str) -> Shard | str:
        try:
            return Shard(address, shard_status(address))
        except ShardError as error:
            return str(error)

    def index(shard: Shard | str) -> tuple[Shard, TarIndex] | str:
        try:
            return shard if isinstance(shard, str) else (shard, _index_of(shard, cache, folder))
        except ShardError as error:
            return str(error)

    with ThreadPoolExecutor(_ASKING) as pool:
        shards = list(pool.map(ask, addresses))
    cache.check_bound([shard for shard in shards if isinstance(shard, Shard)], 2 * (config.window or WINDOW))
    results = []
    with ThreadPoolExecutor(_READING) as pool, counting("indexing shards", len(addresses), progress) as done:
        for number, result in enumerate(pool.map(index, shards)):
            results.append(result)
            done(number + 1)
    return _joined(addresses, results, config)


def _joined(
    addresses: Sequence[str], results: Sequence[tuple[Shard, TarIndex] | str], config: ImagesConfig
) -> ShardIndex:
    """The indexes of all shards as one, unless too many images are lost in damaged ones."""
    found = [result for result in results if not isinstance(result, str)]
    unreadable = [
        (printable(address), result if isinstance(result, str) else result[1].problem)
        for address, result in zip(addresses, results, strict=True)
        if isinstance(result, str) or result[1].problem
    ]
    count = sum(len(index.names) for _, index in found)
    lost = _lost_images(results)
    if lost > config.max_unreadable * (count + lost) or not count:
        if not unreadable:
            raise UserError(f"the shard {printable(addresses[0])} holds no image in a file of a known extension.")
        if not count:
            raise UserError("no shard can be read: " + "; ".join(f"{file} ({why})" for file, why in unreadable[:3]))
        where = f"{len(addresses):,} shards"
        raise UserError(too_many_unreadable(unreadable, count + lost, where, config, lost))
    columns = [
        np.concatenate([np.asarray(getattr(index, name)) for _, index in found])
        for name in ("offsets", "sizes", "labels")
    ]
    numbers = np.repeat(np.arange(len(found), dtype=np.int32), [len(index.names) for _, index in found])
    names = FileNames(name for _, index in found for name in index.names)
    return ShardIndex(tuple(shard for shard, _ in found), SampleTable(numbers, *columns), names, tuple(unreadable))


def _lost_images(results: Sequence[tuple[Shard, TarIndex] | str]) -> int:
    """About how many images damaged shards have lost: as many as a whole shard has, less what was found."""
    whole = [len(result[1].names) for result in results if not isinstance(result, str) and not result[1].problem]
    usual = round(float(np.mean(whole))) if whole else 1
    damaged = [0 if isinstance(r, str) else len(r[1].names) for r in results if isinstance(r, str) or r[1].problem]
    return sum(max(1, usual - found) for found in damaged)


def _index_of(shard: Shard, cache: ShardCache, folder: Path) -> TarIndex:
    """The index of one shard, from the cache folder or built anew."""
    address = shard.address if is_remote(shard.address) else str(Path(shard.address).resolve())
    name = hashlib.sha256(f"{_VERSION} {address}".encode("utf-8", "backslashreplace")).hexdigest()[:32]
    file = folder / f"shard-{name}.npz"
    index = _read(file, shard.status)
    if index is None:
        index = cache.reading(shard, read_tar)
        with suppress(OSError):  # without it everything works too
            write_atomically(file, lambda out: out.write(_content(index, shard.status)))
    return index


def _read(file: Path, status: ShardStatus) -> TarIndex | None:
    """A cached index, or None if it is missing, damaged (every part has a checksum), or of another version."""
    try:
        with np.load(file, allow_pickle=False) as content:
            if str(content["status"]) != f"{status.bytes} {status.version}":
                return None
            raw = content["names"].tobytes()
            names = os.fsdecode(raw).split("\0") if raw else []
            index = TarIndex(names, content["offsets"], content["sizes"], content["labels"], str(content["problem"]))
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None
    same = all(len(column) == len(names) for column in (index.offsets, index.sizes, index.labels))
    return index if same else None


def _content(index: TarIndex, status: ShardStatus) -> bytes:
    buffer = io.BytesIO()
    np.savez(
        buffer,
        status=np.array(f"{status.bytes} {status.version}"),
        names=np.frombuffer(b"\0".join(map(os.fsencode, index.names)), dtype=np.uint8),
        offsets=index.offsets,
        sizes=index.sizes,
        labels=index.labels,
        problem=np.array(index.problem),
    )
    return buffer.getvalue()
