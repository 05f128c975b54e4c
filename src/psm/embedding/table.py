"""A table of embeddings, one row an image: what files of embeddings are written from and read to."""

import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

BLOCK_BYTES = 2**24  # of embeddings that are handled at a time


class Block(NamedTuple):
    """Some consecutive rows of a table."""

    embeddings: np.ndarray  # (n, D)
    paths: list[str]
    labels: np.ndarray | None  # int64 (n,)

    def class_names(self, classes: Sequence[str]) -> list[str | None] | None:
        """The name of each row's class, None where it is unknown; None for a table without labels."""
        return None if self.labels is None else [classes[i] if i >= 0 else None for i in self.labels.tolist()]


@dataclass(frozen=True)
class Table:
    """Embeddings with paths and labels. The embeddings may lie in a memory-mapped file."""

    embeddings: np.ndarray  # float32 or float16 (N, D)
    paths: Sequence[str]  # relative to the data
    labels: np.ndarray | None  # int64 (N,), indices into the classes, -1 where unknown
    classes: tuple[str, ...]
    about: dict[str, Any]  # the encoder, the data and the settings that made the embeddings

    def __len__(self) -> int:
        return len(self.embeddings)

    @property
    def block_rows(self) -> int:
        """Rows of a block of about BLOCK_BYTES."""
        return max(1, BLOCK_BYTES // max(1, self.embeddings.shape[1] * self.embeddings.itemsize))

    def blocks(self) -> Iterator[Block]:
        """The rows in order, a bounded number at a time."""
        for start in range(0, len(self), self.block_rows):
            rows = slice(start, start + self.block_rows)
            paths = list(self.paths[rows])
            yield Block(np.asarray(self.embeddings[rows]), paths, None if self.labels is None else self.labels[rows])

    def label(self, row: int) -> str | None:
        """The name of a row's class, None where it is unknown."""
        known = self.labels is not None and self.labels[row] >= 0
        return self.classes[self.labels[row]] if known else None  # type: ignore[index]


def checksum(embeddings: np.ndarray) -> int:
    """CRC-32 of the embeddings' bytes, read in blocks."""
    value = 0
    step = max(1, BLOCK_BYTES // max(1, embeddings.shape[1] * embeddings.itemsize))
    for start in range(0, len(embeddings), step):
        value = zlib.crc32(np.ascontiguousarray(embeddings[start : start + step]).data, value)
    return value


class Content(NamedTuple):
    """What a file of embeddings holds. Labels are given as numbers or as names of classes."""

    embeddings: np.ndarray
    paths: list[str]
    about: dict[str, Any] | None  # None where the file does not say what made it
    labels: np.ndarray | None = None
    names: Sequence[str | None] | None = None


def about_text(about: dict[str, Any]) -> str:
    """The description of a table as one line of JSON."""
    return json.dumps(about, ensure_ascii=False)


def parse_about(text: str | bytes | None) -> dict[str, Any] | None:
    """The description of a table from JSON; None if there is none."""
    about = None if text is None else json.loads(text)
    return about if isinstance(about, dict) else None
