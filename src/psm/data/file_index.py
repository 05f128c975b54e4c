"""Listing image files, and an index of what was listed: names, sizes and modification times.

Listing a large folder reads every folder and asks for the status of every file, one after the other. The index in the
cache folder has the names, so that the next start only checks them, many at a time: a folder whose modification time is
the same has the same entries, and a file with the same size and modification time the same content. If anything
differs, the folder is listed again.
"""

import hashlib
import io
import logging
import os
import time
import zipfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from psm.config.schema import ImagesConfig
from psm.data import decode
from psm.data.cache import cache_folder
from psm.data.names import printable
from psm.utils.errors import UserError
from psm.utils.files import write_atomically

log = logging.getLogger("psm")

INDEXED_FROM = 1_000  # files; fewer are listed each time
SETTLED = 2_000_000_000  # nanoseconds: a folder changed so shortly before it was listed may change again unnoticed
_VERSION = 1
_THREADS = 16  # that ask for the status of files: the answer of a network file system takes its time
_MISSING = (0, 0)  # bytes and time of a link that leads nowhere: reported as unreadable when it is decoded


@dataclass(frozen=True)
class Files:
    """Image files of one or several roots: paths, and what tells whether the files have changed."""

    roots: tuple[Path, ...]
    paths: Sequence[str]  # below their root
    bytes: np.ndarray  # int64 (N,)
    changed: np.ndarray  # int64 (N,): modification times in nanoseconds
    root: np.ndarray  # int64 (N,): which root
    prefixes: tuple[str, ...] = ("",)  # of each root: what the names of its files begin with

    def __len__(self) -> int:
        return len(self.paths)

    def location(self, index: int) -> Path:
        """The path of a file."""
        return self.roots[self.root[index]] / self.paths[index]

    def name(self, index: int) -> str:
        """The name of a file in its data set."""
        return self.prefixes[self.root[index]] + self.paths[index]

    def names(self) -> list[str]:
        """The names of all files."""
        if len(self.roots) == 1:
            return [self.prefixes[0] + path for path in self.paths] if self.prefixes[0] else list(self.paths)
        return [self.prefixes[root] + path for root, path in zip(self.root.tolist(), self.paths, strict=True)]

    def take(self, indices: np.ndarray) -> "Files":
        """The files at these indices."""
        paths = [self.paths[index] for index in indices.tolist()]
        columns = {name: getattr(self, name)[indices] for name in ("bytes", "changed", "root")}
        return replace(self, paths=paths, **columns)

    @staticmethod
    def join(parts: Sequence["Files"]) -> "Files":
        """The files of several sources, one after the other."""
        starts = np.cumsum([0, *(len(part.roots) for part in parts)])
        return Files(
            tuple(root for part in parts for root in part.roots),
            [path for part in parts for path in part.paths],
            np.concatenate([part.bytes for part in parts]),
            np.concatenate([part.changed for part in parts]),
            np.concatenate([part.root + start for part, start in zip(parts, starts, strict=False)]),
            tuple(prefix for part in parts for prefix in part.prefixes),
        )


def make_files(root: Path, paths: Sequence[str], status: np.ndarray) -> Files:
    """Files of one root with their sizes and times, int64 (N, 2)."""
    return Files((root,), paths, status[:, 0], status[:, 1], np.zeros(len(paths), dtype=np.int64))


@dataclass(frozen=True)
class _Listing:
    """All image files below a folder, and the folders that were read."""

    paths: list[str]
    status: np.ndarray  # int64 (N, 2): bytes and modification time
    folders: list[str]
    folder_times: np.ndarray  # int64 (M,)


def list_files(root: Path, below: str = "", config: ImagesConfig | None = None) -> Files:
    """Every image file below ``root/below``, sorted by path. Paths are relative to ``root``.

    Hidden files and other extensions are ignored. Links are followed, but each real folder is read once, so that
    circular links end. With a configuration, a large folder is indexed in its cache folder.
    """
    index = None if config is None else cache_folder(config, create=False) / _index_name(root, below)
    listing = _read_index(index) if index is not None else None
    if listing is None or not _unchanged(root, listing):
        started = time.time_ns()
        listing = _walk(root, below)
        settled = len(listing.folder_times) and listing.folder_times.max() < started - SETTLED
        if index is not None and len(listing.paths) >= INDEXED_FROM and settled:
            _write_index(index, listing)
    return make_files(root, listing.paths, listing.status)


def file_status(root: Path, paths: Sequence[str]) -> np.ndarray:
    """Bytes and modification time of files, int64 (N, 2); zeros for those that cannot be found."""

    def status(part: Sequence[str]) -> list[tuple[int, int]]:
        return [_status(os.path.join(root, path)) for path in part]  # noqa: PTH118 - faster than a Path for each

    step = max(1, min(1_000, -(-len(paths) // _THREADS)))
    parts = [paths[start : start + step] for start in range(0, len(paths), step)]
    with ThreadPoolExecutor(_THREADS) as pool:
        found = [pair for part in pool.map(status, parts) for pair in part]
    return np.array(found, dtype=np.int64).reshape(-1, 2)


def _status(path: str) -> tuple[int, int]:
    try:
        status = os.stat(path)  # noqa: PTH116
    except (OSError, ValueError):
        return _MISSING
    return status.st_size, status.st_mtime_ns


def _walk(root: Path, below: str) -> _Listing:
    files: list[tuple[str, int, int]] = []
    folders: list[tuple[str, int]] = []
    waiting, seen = [below], set()
    while waiting:
        folder = waiting.pop()
        try:
            identity = (root / folder).stat()
            entries = list(os.scandir(root / folder))
        except OSError as error:
            raise unreadable_folder(root / folder, error) from None
        if (identity.st_dev, identity.st_ino) in seen:
            continue
        seen.add((identity.st_dev, identity.st_ino))
        folders.append((folder, identity.st_mtime_ns))
        entries.sort(key=lambda entry: entry.name)
        for entry in entries:
            name = entry.name
            if name.startswith("."):
                continue
            path = f"{folder}/{name}" if folder else name
            if _is_folder(entry):
                waiting.append(path)
            elif name[name.rfind(".") :].lower() in decode.EXTENSIONS:
                files += _file(entry, path)
    files.sort()
    status = np.array([file[1:] for file in files], dtype=np.int64).reshape(-1, 2)
    times = np.array([time for _, time in folders], dtype=np.int64)
    return _Listing([file[0] for file in files], status, [folder for folder, _ in folders], times)


def subfolders(root: Path) -> list[str]:
    """Names of the folders in a folder, sorted, without hidden ones."""
    try:
        with os.scandir(root) as entries:
            return sorted(entry.name for entry in entries if not entry.name.startswith(".") and _is_folder(entry))
    except OSError as error:
        raise unreadable_folder(root, error) from None


def unreadable_folder(folder: Path, error: OSError) -> UserError:
    """The sentence for a folder that cannot be read."""
    if isinstance(error, FileNotFoundError):
        return UserError(f"The folder {printable(folder)} does not exist any more; it was deleted while it was read.")
    return UserError(f"The folder {printable(folder)} cannot be read ({error.strerror}).")


def _is_folder(entry: os.DirEntry[str]) -> bool:
    """True for a folder or a link to one; False for a link that cannot be followed, such as one to itself."""
    try:
        return entry.is_dir()
    except OSError:
        return False


def _file(entry: os.DirEntry[str], path: str) -> list[tuple[str, int, int]]:
    """The file, or nothing for a pipe or device, which would block when read."""
    try:
        status = entry.stat()
    except OSError:
        return [(path, *_MISSING)]
    return [(path, status.st_size, status.st_mtime_ns)] if entry.is_file() else []


def _index_name(root: Path, below: str) -> str:
    folder = os.fsencode((root / below).resolve())
    return f"files-{hashlib.sha256(b'%d %s' % (_VERSION, folder)).hexdigest()[:32]}.npz"


def _read_index(path: Path) -> _Listing | None:
    """What an index holds, or None if it is missing or damaged (every part of it has a checksum)."""
    try:
        with np.load(path, allow_pickle=False) as content:
            paths, folders = (_unpacked(content[name]) for name in ("paths", "folders"))
            listing = _Listing(paths, content["status"], folders, content["folder_times"])
    except (OSError, ValueError, KeyError, zipfile.BadZipFile, EOFError):
        return None
    whole = listing.status.shape == (len(paths), 2) and listing.folder_times.shape == (len(folders),)
    return listing if whole else None


def _write_index(path: Path, listing: _Listing) -> None:
    """Keep a listing; without an index everything works too, so that a full disk is no error."""
    buffer = io.BytesIO()
    paths, folders = _packed(listing.paths), _packed(listing.folders)
    np.savez(buffer, paths=paths, folders=folders, status=listing.status, folder_times=listing.folder_times)
    with suppress(OSError):
        write_atomically(path, lambda file: file.write(buffer.getvalue()))


def _packed(texts: Iterable[str]) -> np.ndarray:
    return np.frombuffer(b"\0".join(map(os.fsencode, texts)), dtype=np.uint8)


def _unpacked(array: np.ndarray) -> list[str]:
    return os.fsdecode(array.tobytes()).split("\0")


def _unchanged(root: Path, listing: _Listing) -> bool:
    """True if the folders and files are as listed."""
    folders = file_status(root, [folder or "." for folder in listing.folders])
    if not np.array_equal(folders[:, 1], listing.folder_times):
        return False
    return np.array_equal(file_status(root, listing.paths), listing.status)
