"""Copies of remote shards on this machine's disk: only the ones in use, within a bound.

All processes of a machine share the folder. A copy is written under another name and renamed when complete; a lock lets
one process copy while others wait. Removing a copy that another process still needs costs that process another copy,
and never an image: whoever has the file open keeps reading it.
"""

import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TypeVar

from psm.data.shard_files import ShardError, ShardStatus, cached_name, copy_shard, is_remote, shard_status
from psm.utils.errors import ResourceError, UserError
from psm.utils.files import TEMPORARY_PREFIX
from psm.utils.locking import locked
from psm.utils.resources import write_error

T = TypeVar("T")

_ATTEMPTS = 5


@dataclass(frozen=True)
class Shard:
    """A shard as it was indexed."""

    address: str
    status: ShardStatus


class ShardCache:
    """Where the shards of a set are read: local ones in place, remote ones from a copy."""

    def __init__(self, folder: Path, most_bytes: float):
        """Prepare a cache.

        Args:
            folder: of the copies; created when there is one.
            most_bytes: that all copies together may take.
        """
        self.folder, self.most_bytes = folder, most_bytes
        self._needed: set[str] = set()

    def path(self, shard: Shard) -> Path:
        """A file with the shard's content; copied here if it is remote and not here yet."""
        if not is_remote(shard.address):
            if shard_status(shard.address) != shard.status:
                raise ShardError("it has changed since it was indexed; start again to index it anew")
            return Path(shard.address)
        path = self.folder / cached_name(shard.address, shard.status)
        if not path.exists():
            self._copy(shard, path)
        with suppress(OSError):
            os.utime(path)  # the copies used last are removed last
        return path

    def reading(self, shard: Shard, read: Callable[[Path], T]) -> T:
        """What a function reads from a shard's file; again if another process removed the copy just then."""
        for attempt in range(1, _ATTEMPTS + 1):
            path = self.path(shard)
            try:
                return read(path)
            except (FileNotFoundError, ShardError):
                if attempt == _ATTEMPTS or path.exists():
                    raise
        raise AssertionError

    def need(self, shards: Iterable[Shard]) -> None:
        """Remove the copies of all shards but these."""
        needed = {cached_name(shard.address, shard.status) for shard in shards if is_remote(shard.address)}
        for name in self._needed - needed:
            (self.folder / name).unlink(missing_ok=True)
        self._needed = needed

    def check_bound(self, shards: Sequence[Shard], window: int) -> None:
        """Refuse a bound that does not hold two windows, this one and the next, of the largest shards."""
        sizes = sorted((shard.status.bytes for shard in shards if is_remote(shard.address)), reverse=True)
        needed = sum(sizes[: 2 * window])
        if needed > self.most_bytes:
            raise UserError(
                f"images.shard_cache={self.most_bytes / 1e9:g} GB cannot hold two windows of {window} shards "
                f"({needed / 1e9:,.2f} GB): raise it, or give a smaller images.window."
            )

    def _copy(self, shard: Shard, path: Path) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with locked(path.with_suffix(".lock")):
                if path.exists():  # another process has copied it while this one waited
                    return
                if shard_status(shard.address) != shard.status:
                    raise ShardError("it has changed since it was indexed; start again to index it anew")
                part = path.with_name(f"{TEMPORARY_PREFIX}{path.name}")
                try:
                    with part.open("wb") as file:
                        self._reserve(file, shard.status.bytes)
                        copy_shard(shard.address, shard.status, self._writer(file), lambda: file.seek(0))
                        file.truncate()
                    part.replace(path)
                finally:
                    part.unlink(missing_ok=True)
        except OSError as error:
            raise self._unwritable(error) from None

    def _unwritable(self, error: OSError) -> UserError | ResourceError:
        space = f"{self.most_bytes / 1e9:g} GB of space"
        advice = f"; set images.cache to a folder with {space}, or images.shard_cache to less"
        return write_error(f"The folder {self.folder}", error, advice)

    def _writer(self, file: BinaryIO) -> Callable[[bytes], None]:
        """Writes to a file; a full disk is not the server's fault, which would be tried again."""

        def write(block: bytes) -> None:
            try:
                file.write(block)
            except OSError as error:
                raise self._unwritable(error) from None

        return write

    def _reserve(self, part: BinaryIO, needed: int) -> None:
        """Give a new file its size, after removing copies, those used longest ago first, until all is in the bound."""
        with locked(self.folder / "room.lock"):
            self._remove_leftovers()
            copies = []
            for file in self.folder.glob("*.tar"):  # also those that are being made, which have their size already
                with suppress(OSError):
                    status = file.stat()
                    copies.append((status.st_mtime, status.st_size, file))
            total = sum(size for _, size, _ in copies) + max(needed, 0)
            for _, size, file in sorted(copies):
                if total <= self.most_bytes:
                    break
                if file.name not in self._needed and not file.name.startswith(TEMPORARY_PREFIX):
                    file.unlink(missing_ok=True)
                    total -= size
            part.truncate(max(needed, 0))

    def _remove_leftovers(self) -> None:
        """Remove what killed processes left behind; a copy that is being made is locked."""
        for part in self.folder.glob(f"{TEMPORARY_PREFIX}*.tar"):
            lock = part.with_name(part.name.removeprefix(TEMPORARY_PREFIX)).with_suffix(".lock")
            with locked(lock, wait=False) as free:
                if free:
                    part.unlink(missing_ok=True)


class Prefetcher:
    """Copies remote shards in a thread before they are needed. A shard that fails is left to whoever needs it."""

    def __init__(self, cache: ShardCache):
        self.cache = cache
        self._wanted: list[Shard] = []
        self._changed = threading.Condition()
        self._closed = False
        self._thread: threading.Thread | None = None

    def want(self, shards: Iterable[Shard]) -> None:
        """Copy these next, in their order; what was wanted before and not begun is forgotten."""
        with self._changed:
            self._wanted = [shard for shard in shards if is_remote(shard.address)]
            if self._wanted and self._thread is None:
                self._thread = threading.Thread(target=self._run, daemon=True)
                self._thread.start()
            self._changed.notify()

    def close(self) -> None:
        """End after the copy that is being made."""
        with self._changed:
            self._closed, self._wanted = True, []
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._wanted and not self._closed:
                    self._changed.wait()
                if self._closed:
                    return
                shard = self._wanted.pop(0)
            try:
                self.cache.path(shard)
            except (ShardError, UserError, ResourceError):
                time.sleep(0.1)
