"""Data sets larger than memory: decoded once into a file that is memory-mapped from then on.

An entry is a folder named by its fingerprint, with the raw pixels, a checksum of each image and a manifest. It is built
under another name and renamed when complete, so a folder of the right name is complete; a killed build leaves a
``.part`` folder, which the next build removes. A lock lets one process build while the others wait for it. Each image
is verified when a process first reads it.
"""

import json
import os
import shutil
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from psm.config.schema import ImagesConfig
from psm.utils.errors import ResourceError, UserError
from psm.utils.locking import locked
from psm.utils.resources import write_error

_PIXELS, _CHECKSUMS, _SHAPES, _MANIFEST = "pixels.bin", "checksums.bin", "shapes.bin", "manifest.json"
_CHECKSUM_TYPE = np.dtype("<u4")  # CRC-32
_SHAPE_TYPE = np.dtype("<i4")
_HINT = "set images.cache to a folder with enough space, or make the set smaller with images.size or images.limit"


class CacheUnusable(UserError):
    """The cache folder cannot be written or has too little space."""


Failure = tuple[int, str]  # index of an image that could not be read, and the reason
Chunks = Iterable[tuple[np.ndarray | list[np.ndarray], list[Failure]]]


class DamagedImage(UserError):
    """An image in the cache differs from its checksum."""

    def __init__(self, file: Path, name: str):
        super().__init__(
            f"{file} is damaged: {name} differs from its checksum. Remove the folder {file.parent} and start again; "
            "the cache is then rebuilt from the data."
        )
        self.file = file


class CachedPixels:
    """Memory-mapped uint8 images (N, 3, size, size), each verified when it is first read in this process."""

    dtype = np.dtype(np.uint8)

    def __init__(self, file: Path, shape: tuple[int, ...], checksums: np.ndarray):
        self.file, self.shape, self.checksums = file, shape, checksums
        self._verified = np.zeros(len(checksums), dtype=bool)
        # An empty file cannot be mapped.
        self._pixels = np.memmap(file, np.uint8, "c", shape=shape) if shape[0] else np.empty(shape, np.uint8)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: int) -> np.ndarray:
        image = self._pixels[index]
        self._verify(index, image)
        return image

    def _verify(self, index: int, image: np.ndarray) -> None:
        if not self._verified[index]:
            if zlib.crc32(image.data) != self.checksums[index]:
                raise DamagedImage(self.file, f"image {index}")
            self._verified[index] = True

    def in_memory(self) -> np.ndarray:
        """All images, verified, (N, 3, size, size): memory that the processes of a machine share."""
        images = np.asarray(self._pixels)  # without memmap's cost for each row
        for index, image in enumerate(images):
            self._verify(index, image)
        return images

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the file's name rather than its content."""
        return CachedPixels, (self.file, self.shape, self.checksums)


def cache_folder(config: ImagesConfig, create: bool = True) -> Path:
    """The cache folder: images.cache, $PSM_CACHE, or ``psm`` below the user's cache folder. Created if asked."""
    usual = f"{os.environ.get('XDG_CACHE_HOME') or '~/.cache'}/psm"
    folder = Path(config.cache or os.environ.get("PSM_CACHE") or usual).expanduser()
    if not create:
        return folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CacheUnusable(
            f"The cache folder {folder} cannot be made ({error.strerror}); set images.cache to a folder you can write."
        ) from None
    return folder


class CachedWhole:
    """Memory-mapped whole images, uint8 (H, W, 3) each of its own size, verified when first read in this process."""

    def __init__(self, file: Path, shapes: np.ndarray, checksums: np.ndarray):
        """Map a file.

        Args:
            file: the images one after the other.
            shapes: int32 (N, 2), height and width of each.
            checksums: of each, (N,).
        """
        self.file, self.shapes, self.checksums = file, shapes, checksums
        self._ends = np.cumsum(np.concatenate([[0], 3 * np.prod(shapes, axis=1, dtype=np.int64)]))
        self._verified = np.zeros(len(checksums), dtype=bool)
        self._bytes = np.asarray(np.memmap(file, np.uint8, "c")) if len(shapes) else np.empty(0, np.uint8)

    def __len__(self) -> int:
        return len(self.shapes)

    def __getitem__(self, index: int) -> np.ndarray:
        image = self._bytes[self._ends[index] : self._ends[index + 1]]
        if not self._verified[index]:
            if zlib.crc32(image.data) != self.checksums[index]:
                raise DamagedImage(self.file, f"image {index}")
            self._verified[index] = True
        return image.reshape(*self.shapes[index], 3)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the file's name rather than its content."""
        return CachedWhole, (self.file, self.shapes, self.checksums)


Cached = CachedPixels | CachedWhole


@dataclass(frozen=True)
class CacheEntry:
    """The images of one split in the cache: squares of one size, or whole images each of its own."""

    cache: Path
    fingerprint: str
    size: int
    whole: bool = False

    @property
    def folder(self) -> Path:
        """The folder of a complete entry."""
        return self.cache / self.fingerprint

    def open(self, chunks: Callable[[], Chunks], most_bytes: int) -> tuple[Cached, list[Failure]]:
        """Map the images, after building the entry if it is missing.

        Args:
            chunks: reads the images and the failures, to build the entry.
            most_bytes: disk space that the images may need.

        Returns:
            The images, and the failures met when they were read.
        """
        found = self._read()
        if found is not None:
            return found
        try:
            with locked(self.cache / f"{self.fingerprint}.lock"):
                found = self._read()  # another process may have built it while this one waited
                if found is None:
                    self._build(chunks, most_bytes)
                    found = self._read()
        except OSError as error:
            problem = write_error(f"The cache in {self.cache}", error, f"; {_HINT}")
            raise problem if isinstance(problem, ResourceError) else CacheUnusable(str(problem)) from None
        if found is None:
            raise CacheUnusable(f"The cache in {self.cache} cannot be read back after writing; {_HINT}.")
        return found

    def _read(self) -> tuple[Cached, list[Failure]] | None:
        """The entry, or None if it is missing, incomplete, or its manifest or checksums are damaged."""
        try:
            manifest = json.loads((self.folder / _MANIFEST).read_text())
            if manifest.pop("crc32") != _crc_of(manifest):
                return None
            shape = (int(manifest["count"]), 3, self.size, self.size)
            shapes = self._read_shapes(manifest) if self.whole else None
            counts = shape if shapes is None else (3, int(np.prod(shapes, axis=1, dtype=np.int64).sum()))
            expected = np.prod(counts, dtype=np.int64)
            if (self.folder / _PIXELS).stat().st_size != expected:
                return None
            raw = (self.folder / _CHECKSUMS).read_bytes()
            if len(raw) != shape[0] * _CHECKSUM_TYPE.itemsize or zlib.crc32(raw) != manifest["checksums"]:
                return None
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None
        file, checksums = self.folder / _PIXELS, np.frombuffer(raw, _CHECKSUM_TYPE)
        pixels = CachedPixels(file, shape, checksums) if shapes is None else CachedWhole(file, shapes, checksums)
        return pixels, [(index, reason) for index, reason in manifest["failures"]]

    def _read_shapes(self, manifest: dict[str, Any]) -> np.ndarray:
        """Height and width of whole images, int32 (N, 2)."""
        raw = (self.folder / _SHAPES).read_bytes()
        if zlib.crc32(raw) != manifest["shapes"]:
            raise ValueError("damaged")
        return np.frombuffer(raw, _SHAPE_TYPE).reshape(int(manifest["count"]), 2)

    def _build(self, chunks: Callable[[], Chunks], most_bytes: int) -> None:
        _remove_leftovers(self.cache)
        part = self.folder.with_suffix(".part")
        for stale in (part, self.folder):
            shutil.rmtree(stale, ignore_errors=True)
        _check_disk_space(self.cache, most_bytes)
        part.mkdir()
        try:
            self._write(part, chunks())
            part.rename(self.folder)
            _sync_folder(self.cache)
        finally:
            shutil.rmtree(part, ignore_errors=True)

    def _write(self, part: Path, chunks: Chunks) -> None:
        checksums: list[int] = []
        shapes: list[tuple[int, ...]] = []
        failures: list[Failure] = []
        with (part / _PIXELS).open("wb") as file:
            for images, failed in chunks:
                for image in map(np.ascontiguousarray, images):
                    file.write(image.data)
                    checksums.append(zlib.crc32(image.data))
                    shapes.append(image.shape[:2])
                failures += failed
            file.flush()
            os.fsync(file.fileno())
        raw = np.array(checksums, dtype=_CHECKSUM_TYPE).tobytes()
        manifest = {"count": len(checksums), "size": self.size, "failures": failures, "checksums": zlib.crc32(raw)}
        if self.whole:
            sizes = np.array(shapes, dtype=_SHAPE_TYPE).tobytes()
            manifest["shapes"] = zlib.crc32(sizes)
            _write_synced(part / _SHAPES, sizes)
        _write_synced(part / _CHECKSUMS, raw)
        _write_synced(part / _MANIFEST, json.dumps(manifest | {"crc32": _crc_of(manifest)}).encode())
        _sync_folder(part)


def _crc_of(manifest: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(manifest, sort_keys=True).encode())


def _write_synced(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _check_disk_space(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise ResourceError(
            f"The images need {needed / 1e9:.1f} GB in the cache folder {folder}, where {free / 1e9:.1f} GB are free; "
            f"{_HINT}."
        )


def _remove_leftovers(folder: Path) -> None:
    """Remove what killed builds left behind; a build still running holds its lock and is spared."""
    for part in folder.glob("*.part"):
        with locked(part.with_suffix(".lock"), wait=False) as free:
            if free:
                shutil.rmtree(part, ignore_errors=True)


def _sync_folder(folder: Path) -> None:
    """Make a rename or a new name in a folder survive a power cut."""
    if os.name == "nt":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
