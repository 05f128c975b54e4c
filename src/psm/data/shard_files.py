"""Shards as files: which addresses are shards, what tells that one has changed, and copying a remote one here.

A local shard is read where it is. Any other address is opened by fsspec (http, https, s3, gs, hf, ...); a shard of
``file://`` is copied as a remote one, which suits slow network file systems.
"""

import hashlib
import itertools
import os
import queue
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from psm.data.names import printable
from psm.utils.errors import UserError

T = TypeVar("T")

STALL_SECONDS = 30.0  # without a byte, after which a transfer is given up
ATTEMPTS = 3
BLOCK = 1 << 22  # bytes copied at a time
_BRACES = re.compile(r"\{(?:(-?\d+)\.\.(-?\d+)|([^{}]*,[^{}]*))\}")
# What file systems call a version of a file.
_VERSION_KEYS = ("ETag", "etag", "Content-MD5", "md5Hash", "generation", "mtime", "LastModified", "Last-Modified")


class ShardError(Exception):
    """A shard that cannot be read; the message is the reason."""


@dataclass(frozen=True)
class ShardStatus:
    """Size of a shard, and a text that changes with its content."""

    bytes: int
    version: str


def expand_braces(text: str) -> list[str]:
    """``a-{00..02}.tar`` as ``a-00.tar`` to ``a-02.tar``, and ``{a,b}.tar`` as both, as a shell does."""
    match = _BRACES.search(text)
    if match is None:
        return [text]
    first, last, choice = match.groups()
    if choice is None:
        width = max(len(first), len(last)) if first.startswith("0") or last.startswith("0") else 0
        step = 1 if int(first) <= int(last) else -1
        values = [str(number).zfill(width) for number in range(int(first), int(last) + step, step)]
    else:
        values = choice.split(",")
    head, tail = text[: match.start()], text[match.end() :]
    return list(itertools.chain.from_iterable(expand_braces(f"{head}{value}{tail}") for value in values))


def is_remote(address: str) -> bool:
    """True for an address that fsspec opens."""
    return "://" in address


def is_shards(source: str) -> bool:
    """True if a source is shards: tar files by name, pattern or address, or a folder that holds nothing else."""
    if re.search(r"\.tar(\.gz|\.zst|\.xz|\.bz2)?$|\.tgz$", source) or is_remote(source):
        return True
    folder = Path(source).expanduser()
    if not folder.is_dir():
        return False
    names = [entry.name for entry in os.scandir(folder) if not entry.name.startswith(".")]
    return any(name.endswith(".tar") for name in names) and all(_beside_shards(name) for name in names)


def _beside_shards(name: str) -> bool:
    return name.endswith((".tar", ".txt", ".json", ".idx"))


def shard_addresses(source: str) -> list[str]:
    """The addresses of a source's shards, in order: a folder's, a pattern's (braces, ``*``), or the one itself."""
    found = []
    for text in expand_braces(source):
        if is_remote(text):
            found += _remote_matches(text) if "*" in text else [text]
            continue
        path = Path(text).expanduser()
        if path.is_dir():
            found += sorted(map(str, path.glob("*.tar")))
        elif "*" in path.name or "?" in path.name:
            found += sorted(map(str, path.parent.glob(path.name)))
        else:
            found.append(str(path))
    if not found:
        raise UserError(f"data={source} matches no shard: give existing .tar files.")
    compressed = next((address for address in found if not address.partition("?")[0].endswith(".tar")), None)
    if compressed is not None:
        raise UserError(
            f"data={printable(compressed)} is not a .tar file: shards are uncompressed tar files, so that an image can "
            "be read by its place."
        )
    return found


def _remote_matches(pattern: str) -> list[str]:
    """The addresses that a pattern with ``*`` matches."""
    system, path = _file_system(pattern)
    try:
        return sorted(system.unstrip_protocol(found) for found in _timed(lambda: system.glob(path), STALL_SECONDS))
    except Exception as error:  # of many kinds, from many file systems
        raise UserError(f"data={pattern} cannot be listed ({error}): give the shards' names with braces.") from None


def shard_status(address: str) -> ShardStatus:
    """Size and version of a shard."""
    if not is_remote(address):
        try:
            status = Path(address).stat()
        except OSError as error:
            raise ShardError(error.strerror or str(error)) from None
        return ShardStatus(status.st_size, str(status.st_mtime_ns))

    def ask() -> ShardStatus:
        system, path = _file_system(address)
        info = system.info(path)
        version = " ".join(str(info[key]) for key in _VERSION_KEYS if info.get(key))
        return ShardStatus(int(info.get("size") or -1), version)

    return _attempts(lambda: _timed(ask, STALL_SECONDS))


def copy_shard(address: str, status: ShardStatus, write: Callable[[bytes], Any], restart: Callable[[], Any]) -> None:
    """Copy a remote shard; a transfer that stalls or ends early is begun again, at most ``ATTEMPTS`` times in all.

    Args:
        address: of the shard.
        status: what the shard must be.
        write: receives its bytes, in blocks.
        restart: called before each attempt, to forget what was written.
    """

    def transfer() -> None:
        restart()
        file = _timed(lambda: _open(address), STALL_SECONDS)
        copied = 0
        while block := _timed(lambda: file.read(BLOCK), STALL_SECONDS):
            write(block)
            copied += len(block)
        _timed(file.close, STALL_SECONDS)
        if 0 <= status.bytes != copied:
            raise ShardError(f"the server sent {copied:,} of {status.bytes:,} bytes")

    _attempts(transfer)


def read_beside(address: str, name: str) -> bytes | None:
    """The content of a small file in the folder of a shard, or None if there is none."""
    if not is_remote(address):
        file = Path(address).parent / name
        return file.read_bytes() if file.is_file() else None
    system, path = _file_system(f"{address.partition('?')[0].rpartition('/')[0]}/{name}")
    try:
        return _timed(lambda: system.cat_file(path), STALL_SECONDS)
    except Exception:  # it is not there, or the server does not say
        return None


def cached_name(address: str, status: ShardStatus) -> str:
    """The file name of a remote shard's copy."""
    text = f"{address}\0{status.bytes}\0{status.version}"
    return f"{hashlib.sha256(text.encode('utf-8', 'backslashreplace')).hexdigest()[:32]}.tar"


def _open(address: str) -> BinaryIO:
    system, path = _file_system(address)
    # One request from start to end: some servers know no ranges.
    return system.open(path, "rb", block_size=0) if address.startswith("http") else system.open(path, "rb")


def _file_system(address: str) -> tuple[Any, str]:
    """The file system of an address (of this process: they do not survive a fork) and the path within it."""
    try:
        from fsspec.core import url_to_fs
    except ImportError:
        raise UserError(f"data={address} needs fsspec: pip install 'psm[shards]'.") from None
    options = {}
    if address.startswith("http"):
        from aiohttp import ClientTimeout

        limits = ClientTimeout(total=None, sock_connect=STALL_SECONDS, sock_read=STALL_SECONDS)
        options = {"client_kwargs": {"timeout": limits}}
    try:
        return url_to_fs(address, **options)
    except ImportError as error:  # fsspec names the package that it lacks
        raise UserError(f"data={address} cannot be opened: {error}") from None
    except ValueError as error:
        raise UserError(f"data={address} cannot be opened: {error}; give a path, or an address of fsspec.") from None


def _attempts(function: Callable[[], T]) -> T:
    """What a function returns; repeated where the other side fails, but not where a file does not exist."""
    for attempt in range(1, ATTEMPTS + 1):
        try:
            return function()
        except UserError:
            raise
        except FileNotFoundError:
            raise ShardError("it does not exist") from None
        except Exception as error:
            if attempt == ATTEMPTS:
                said = str(error) or type(error).__name__
                raise ShardError(f"{printable(said)}, {ATTEMPTS} times") from None
    raise AssertionError


def _timed(function: Callable[[], T], seconds: float) -> T:
    """What a function returns within some seconds; in a thread that is left to itself if it does not."""
    answer: queue.SimpleQueue[tuple[bool, Any]] = queue.SimpleQueue()

    def call() -> None:
        try:
            answer.put((True, function()))
        except BaseException as error:
            answer.put((False, error))

    threading.Thread(target=call, daemon=True).start()
    try:
        done, value = answer.get(timeout=seconds)
    except queue.Empty:
        raise ShardError(f"the server sent nothing for {seconds:g} seconds") from None
    if not done:
        raise value
    return value
