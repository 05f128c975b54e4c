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
            except ShardError:
                if attempt == _ATTEMPTS or path.exists():
                    raise
            except FileNotFoundError:
                if attempt == _ATTEMPTS:
                    raise ShardError("its copy is removed before it is read: raise images.shard_cache") from None
        raise AssertionError

    def need(self, shards: Iterable[Shard]) -> None:
        """Remove the copies of all shards but these."""
        needed = {cached_name(shard.address, shard.status) for shard in shards if is_remote(shard.address)}
        for name in self._needed - needed:
            (self.folder / name).unlink(missing_ok=True)
        self._needed = needed

    def check_bound(self, shards: Sequence[Shard], in_use: int) -> None:
        """Refuse a bound that does not hold as many of the largest shards as are in use at a time."""
        sizes = sorted((shard.status.bytes for shard in shards if is_remote(shard.address)), reverse=True)
        needed = sum(sizes[:in_use])
        if needed > self.most_bytes:
            raise UserError(
                f"images.shard_cache={self.most_bytes / 1e9:g} GB cannot hold the {min(in_use, len(sizes))} shards in "
                f"use at a time ({needed / 1e9:,.2f} GB; two windows, or what is read ahead): raise it, or give a "
                "smaller images.window."
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
        """Give a new file its size once that is within the bound with all others, some of which are removed for it.

        Waits while other processes make copies that leave no room.
        """
        while True:
            with locked(self.folder / "room.lock"):
                if self._make_room(max(needed, 0)):
                    part.truncate(max(needed, 0))
                    return
            time.sleep(0.1)

    def _make_room(self, needed: int) -> bool:
        """Remove copies until so many bytes more are within the bound; False while that cannot be.

        Those that this process does not need go first, of these the ones used longest ago.
        """
        self._remove_leftovers()
        copies, making = [], 0
        for file in self.folder.glob("*.tar"):
            with suppress(OSError):
                status = file.stat()
                if file.name.startswith(TEMPORARY_PREFIX):  # it has its size already
                    making += status.st_size
                else:
                    copies.append((file.name in self._needed, status.st_mtime, status.st_size, file))
        total = making + needed + sum(size for _, _, size, _ in copies)
        for _, _, size, file in sorted(copies):
            if total <= self.most_bytes:
                break
            file.unlink(missing_ok=True)
            total -= size
        return total <= self.most_bytes or not making

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
