"""Names of images, in little memory: packed file paths, or names computed from an image's position."""

import os
import zlib
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import overload

import numpy as np


class FileNames(Sequence[str]):
    """Paths packed into one buffer: their bytes and 4 or 8 more each, instead of about 60 for a ``str``."""

    def __init__(self, paths: Iterable[str]):
        encoded = [os.fsencode(path) for path in paths]
        ends = np.cumsum([0, *map(len, encoded)], dtype=np.int64)
        self._ends = ends.astype(np.uint32) if ends[-1] < 2**32 else ends
        self._bytes = b"".join(encoded)

    def __len__(self) -> int:
        return len(self._ends) - 1

    @property
    def checksum(self) -> int:
        """CRC-32 of all names in their order."""
        return zlib.crc32(self._ends.astype("<i8").tobytes(), zlib.crc32(self._bytes))

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            if step != 1:
                return [self[i] for i in range(start, stop, step)]
            ends = self._ends[start : max(start, stop) + 1].tolist()  # all at once: a tenth of the time of one by one
            return [os.fsdecode(self._bytes[first:last]) for first, last in pairwise(ends)]
        place = range(len(self))[index]
        return os.fsdecode(self._bytes[int(self._ends[place]) : int(self._ends[place + 1])])


class PositionNames(Sequence[str]):
    """Names of the images of files that hold many: the file and the image's position in it, ``data_batch_1/123``."""

    def __init__(self, files: Sequence[str], counts: Sequence[int], indices: np.ndarray | None = None):
        """Name the images of a set.

        Args:
            files: the files, in order.
            counts: how many images each holds.
            indices: (N,) the images of all files that are in the set; None: all.
        """
        self._files, self._ends = tuple(files), np.cumsum(counts)
        self._indices = indices

    def __len__(self) -> int:
        return int(self._ends[-1]) if self._indices is None else len(self._indices)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return self._named(np.arange(*index.indices(len(self))))
        return self._named(np.array([range(len(self))[index]]))[0]

    def _named(self, places: np.ndarray) -> list[str]:
        positions = places if self._indices is None else self._indices[places]
        files = np.searchsorted(self._ends, positions, side="right")
        firsts = np.concatenate([[0], self._ends[:-1]])[files]
        numbers = (positions - firsts).tolist()
        return [f"{self._files[file]}/{number}" for file, number in zip(files.tolist(), numbers, strict=True)]


class SelectedNames(Sequence[str]):
    """The names at some indices (N,) of others, looked up when they are asked for."""

    def __init__(self, names: Sequence[str], indices: np.ndarray):
        self._names, self._indices = names, indices

    def __len__(self) -> int:
        return len(self._indices)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        return self._names[int(self._indices[index])]


def printable(path: str | os.PathLike[str]) -> str:
    """A path as text that can be printed; file names may hold any bytes."""
    return str(path).encode("utf-8", "backslashreplace").decode()
