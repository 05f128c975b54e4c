"""Images too many for memory: decoded once into a file that is memory-mapped from then on.

An entry is a folder named by its fingerprint, with the raw pixels and a manifest. It is built under another name and
renamed when complete, so a folder of the right name is a complete one; a killed build leaves only a ``.part`` folder,
which the next build removes. A lock lets one process build while the others wait for it.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from psm.config.schema import ImagesConfig
from psm.utils.errors import UserError
from psm.utils.locking import locked

_PIXELS, _MANIFEST = "pixels.bin", "manifest.json"
_HINT = "set images.cache to a folder with room, or make the set smaller with images.size or images.limit"

Windows = Iterable[tuple[np.ndarray, list[tuple[int, str]]]]


def folder(config: ImagesConfig) -> Path:
    """The cache folder: images.cache, or ``psm`` below the user's cache folder. Created when missing."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "psm"
    place = Path(config.cache).expanduser() if config.cache else home
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"The cache folder {place} cannot be made ({error.strerror}); set images.cache to a folder you can write."
        ) from None
    return place


@dataclass(frozen=True)
class Entry:
    """One set of pixels in the cache."""

    cache: Path
    fingerprint: str
    size: int

    @property
    def _home(self) -> Path:
        return self.cache / self.fingerprint

    def open(self, windows: Callable[[], Windows], most_bytes: int) -> tuple[np.ndarray, list[tuple[int, str]]]:
        """The mapped pixels (N, 3, size, size) and the failures met in making them; built now if not there."""
        found = self._read()
        if found is not None:
            return found
        try:
            with locked(self.cache / f"{self.fingerprint}.lock"):
                found = self._read()  # another process may have built it while this one waited
                if found is None:
                    self._build(windows, most_bytes)
                    found = self._read()
        except OSError as error:
            raise UserError(f"The cache in {self.cache} cannot be written ({error.strerror}); {_HINT}.") from None
        return found

    def _read(self) -> tuple[np.ndarray, list[tuple[int, str]]] | None:
        try:
            manifest = json.loads((self._home / _MANIFEST).read_text())
            shape = (int(manifest["count"]), 3, self.size, self.size)
            if (self._home / _PIXELS).stat().st_size != np.prod(shape, dtype=np.int64):
                return None
        except (OSError, ValueError, KeyError, TypeError):
            return None
        if shape[0] == 0:
            pixels = np.empty(shape, dtype=np.uint8)  # an empty file cannot be mapped
        else:
            pixels = np.memmap(self._home / _PIXELS, dtype=np.uint8, mode="r", shape=shape)
        return pixels, [(index, reason) for index, reason in manifest["failures"]]

    def _build(self, windows: Callable[[], Windows], most_bytes: int) -> None:
        _remove_leftovers(self.cache)
        part = self._home.with_suffix(".part")
        for stale in (part, self._home):
            shutil.rmtree(stale, ignore_errors=True)
        _check_room(self.cache, most_bytes)
        part.mkdir()
        try:
            self._write(part, windows())
            part.rename(self._home)
            _flush(self.cache)
        finally:
            shutil.rmtree(part, ignore_errors=True)

    def _write(self, part: Path, windows: Windows) -> None:
        count, failures = 0, []
        with (part / _PIXELS).open("wb") as file:
            for pixels, missed in windows:
                file.write(np.ascontiguousarray(pixels).data)
                count += len(pixels)
                failures += missed
            file.flush()
            os.fsync(file.fileno())
        with (part / _MANIFEST).open("w") as file:
            json.dump({"count": count, "size": self.size, "failures": failures}, file)
            file.flush()
            os.fsync(file.fileno())
        _flush(part)


def _check_room(place: Path, needed: int) -> None:
    free = shutil.disk_usage(place).free
    if needed > free:
        raise UserError(
            f"The images need {needed / 1e9:.1f} GB in the cache folder {place}, where {free / 1e9:.1f} GB are free; "
            f"{_HINT}."
        )


def _remove_leftovers(place: Path) -> None:
    """Remove what killed builds of other sets left behind; a build still running holds its lock and is spared."""
    for part in place.glob("*.part"):
        with locked(part.with_suffix(".lock"), wait=False) as free:
            if free:
                shutil.rmtree(part, ignore_errors=True)


def _flush(directory: Path) -> None:
    """Make a rename or a new name in a folder last through a power cut."""
    if os.name == "nt":
        return
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
