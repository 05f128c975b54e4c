"""A file of embeddings that can be searched."""

from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from psm.embedding.faiss_search import InvertedFile
from psm.embedding.formats import read_table
from psm.embedding.neighbors import inverse_norms, nearest_rows
from psm.utils.errors import UserError


class ImageIndex:
    """The images of a file that `psm embed` wrote, searched by cosine similarity.

    Examples:
        >>> index = psm.ImageIndex("features.parquet")  # doctest: +SKIP
        >>> similarity, rows = index.search(psm.Embedder("runs/a").transform(["photo.jpg"]), k=5)  # doctest: +SKIP
        >>> [index.paths[row] for row in rows[0]]  # doctest: +SKIP
    """

    def __init__(self, features: str | Path, index: str = "exact", probes: int = 32):
        """Open a file.

        Args:
            features: the file.
            index: exact or faiss.
            probes: faiss: lists that a search looks into.
        """
        self.file = Path(features).expanduser()
        self.table = read_table(self.file)
        self.paths = self.table.paths
        self._inverted = InvertedFile(self.table, self.file, probes) if index == "faiss" else None
        if self._inverted is None:
            self._scale = inverse_norms(self.table.embeddings)

    def __len__(self) -> int:
        return len(self.table)

    def search(self, queries: Any, k: int = 20, exclude: Any = None) -> tuple[np.ndarray, np.ndarray]:
        """The k rows most similar to each query, most similar first.

        Args:
            queries: embeddings (Q, D) of any length, by the encoder that made the file.
            k: how many; fewer are returned where the file has fewer.
            exclude: (Q,) a row that each query does not find, -1 for none; None for none at all.

        Returns:
            Cosine similarities (Q, k) and row numbers (Q, k); -inf and -1 where faiss found too few.
        """
        vectors = torch.as_tensor(np.asarray(queries, dtype=np.float32))
        width = self.table.embeddings.shape[1]
        if vectors.ndim != 2 or vectors.shape[1] != width:
            given = tuple(vectors.shape)
            raise UserError(f"queries of shape {given} cannot be searched in {self.file}: give (Q, {width}).")
        left_out = None if exclude is None else torch.as_tensor(np.asarray(exclude), dtype=torch.long)
        k = min(k, len(self) - (left_out is not None))
        if self._inverted is not None:
            similarity, rows = self._inverted.search(vectors, k, left_out)
        else:
            similarity, rows = nearest_rows(self.table.embeddings, vectors, k, self._scale, left_out)
        return similarity.numpy(), rows.numpy()

    def vectors(self, rows: list[int]) -> Tensor:
        """The embeddings of some rows, float32 (n, D)."""
        return torch.from_numpy(np.asarray(self.table.embeddings[rows], dtype=np.float32))

    def row_of(self, path: str) -> int | None:
        """The row of an image by its path relative to the data; None if there is none."""
        return self._row_of.get(path)

    @cached_property
    def _row_of(self) -> dict[str, int]:
        return {path: row for row, path in enumerate(self.paths)}
