"""Approximate search by the inverted lists of faiss, for sets that an exact search is too slow for.

The index is made once and kept beside the file of embeddings, as ``FEATURES.faiss``, with what it was made of in
``FEATURES.faiss.json``. Similarities of what it finds are computed from the embeddings themselves.
"""

import json
import logging
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

from psm.embedding.table import Table
from psm.utils.errors import UserError
from psm.utils.files import replaced_atomically, write_text_atomically
from psm.utils.resources import write_error

log = logging.getLogger("psm")
SUFFIX = ".faiss"
MANY = 100_000  # rows of an index that is announced, because it takes a minute or more
SAMPLE = 64  # rows that a list's centroid is fitted to
LEAST = 40  # rows a list


class InvertedFile:
    """An inverted file of a table's rows: each lies in the list of the centroid that is most similar to it."""

    def __init__(self, table: Table, features: Path, probes: int):
        """Open the index of a table, made first where it is missing, damaged or of other rows.

        Args:
            table: the embeddings.
            features: their file.
            probes: lists that a search looks into.
        """
        self.table = table
        self.path = features.with_name(features.name + SUFFIX)
        self._index = self._stored()
        if self._index is None:
            self._index = self._made()
        self._index.nprobe = min(probes, self._index.nlist)

    def search(self, queries: Tensor, k: int, exclude: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """As ``nearest_rows``; rows that the lists did not give are -1, with a similarity of -inf, at the end."""
        unit = normalize(queries.float(), dim=1)
        wanted = k + (exclude is not None)
        rows = torch.from_numpy(self._index.search(unit.numpy(), min(wanted, len(self.table)))[1])
        vectors = torch.from_numpy(np.asarray(self.table.embeddings[rows.clamp(min=0).numpy()], dtype=np.float32))
        similarity = (normalize(vectors, dim=2) * unit[:, None]).sum(2)
        missing = rows < 0 if exclude is None else (rows < 0) | (rows == exclude[:, None])
        similarity, order = similarity.masked_fill(missing, -torch.inf).sort(1, descending=True)
        return similarity[:, :k], rows.masked_fill(missing, -1).gather(1, order)[:, :k]

    def _stored(self) -> Any:
        """The index in the file, None if it is not there or not of these rows."""
        try:
            about = json.loads(self._about.read_text())
            if about != self._identity() | {"file": _file_checksum(self.path)}:
                return None
            return faiss().read_index(str(self.path))
        except (OSError, ValueError, RuntimeError):
            return None

    def _made(self) -> Any:
        count, width = self.table.embeddings.shape
        lists = max(1, min(round(4 * count**0.5), count // LEAST))
        if count >= MANY:
            log.warning("making %s of %s rows, once: this takes minutes.", self.path, f"{count:,}")
        index = faiss().index_factory(width, f"IVF{lists},SQfp16", faiss().METRIC_INNER_PRODUCT)
        index.cp.spherical = True
        random = np.random.default_rng(0)
        sample = np.sort(random.choice(count, min(count, SAMPLE * lists), replace=False))
        index.train(_unit(self.table.embeddings[sample]))
        for rows in self._blocks():
            index.add(rows)
        try:
            with replaced_atomically(self.path) as path:
                faiss().write_index(index, str(path))
            about = self._identity() | {"file": _file_checksum(self.path)}
            write_text_atomically(self._about, json.dumps(about))
        except OSError as error:
            raise write_error(str(self.path), error, "; use index=exact") from None
        return index

    def _blocks(self) -> Iterator[np.ndarray]:
        for block in self.table.blocks():
            yield _unit(block.embeddings)

    @property
    def _about(self) -> Path:
        return self.path.with_name(self.path.name + ".json")

    def _identity(self) -> dict[str, Any]:
        return {"crc32": self.table.about["crc32"], "count": len(self.table)}


def faiss() -> ModuleType:
    """The library, or how to get it."""
    try:
        import faiss
    except ImportError:
        raise UserError("index=faiss needs faiss: pip install 'psm[faiss]', or use index=exact.") from None
    return faiss


def _unit(rows: np.ndarray) -> np.ndarray:
    rows = np.ascontiguousarray(rows, dtype=np.float32)
    return rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12)


def _file_checksum(path: Path) -> int:
    value = 0
    with path.open("rb") as file:
        while block := file.read(2**24):
            value = zlib.crc32(block, value)
    return value
