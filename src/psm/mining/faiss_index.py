"""Approximate search in a bank by the inverted lists of faiss: an extra for large banks on a CPU.

Rows lie in the list of the centroid that is nearest to them, and a search looks into the lists whose centroids are
nearest to the query. The centroids are part of the state dict, so that a resumed run finds what an uninterrupted one
would. Figures and recall: ``docs/speed.md``.
"""

from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from psm.utils.errors import UserError

PROBES = 16  # lists that a search looks into
ROUNDS = 4  # of k-means, from the centroids before
SAMPLE = 32  # rows that a centroid is fitted to, at most


def faiss() -> ModuleType:
    try:
        import faiss
    except ImportError:
        raise UserError(
            "bank.index=faiss needs faiss: pip install 'psm[faiss]', or leave bank.index out for the exact search."
        ) from None
    return faiss


class InvertedLists(nn.Module):
    """Finds places in a bank of ``size`` rows. Ready once it was fitted to rows; told of every row that is replaced."""

    def __init__(self, size: int, width: int):
        super().__init__()
        faiss()
        self.lists, self.width = min(size, max(1, round(4 * size**0.5))), width
        self.centroids = torch.zeros(0, width)  # none before the first fit
        self._index: Any = None  # made of centroids and rows when it is needed

    def get_extra_state(self) -> Tensor:
        return self.centroids

    def set_extra_state(self, state: Tensor) -> None:
        self.centroids, self._index = state.cpu(), None

    @property
    def ready(self) -> bool:
        return len(self.centroids) > 0

    def fit(self, rows: Tensor) -> None:
        """Find centroids for the rows (M, D), starting from the present ones; none where rows are no numbers."""
        self._index = None
        if not rows.isfinite().all():  # the run has diverged, and whoever watches it says so better
            self.centroids = self.centroids[:0]
            return
        clusters = faiss().Kmeans(
            self.width,
            self.lists,
            niter=ROUNDS,
            spherical=True,
            min_points_per_centroid=1,
            max_points_per_centroid=SAMPLE,
        )
        clusters.train(rows.float().numpy(), init_centroids=self.centroids.numpy() if self.ready else None)
        self.centroids = torch.from_numpy(clusters.centroids.copy())

    def replace(self, first: int, rows: Tensor) -> None:
        """Rows were written from the place ``first`` on."""
        if self._index is not None:
            places = torch.arange(first, first + len(rows))
            self._index.remove_ids(faiss().IDSelectorRange(first, first + len(rows)))
            self._index.add_with_ids(rows.float().numpy(), places.numpy())

    def search(self, rows: Tensor, vectors: Tensor, count: int) -> Tensor:
        """Places (N, count) of rows like the vectors (N, D), best first; -1 where the lists hold too few."""
        if self._index is None:
            self._index = self._filled(rows.float())
        return torch.from_numpy(self._index.search(vectors.float().numpy(), count)[1])

    def _filled(self, rows: Tensor) -> Any:
        library = faiss()
        self._quantizer = library.IndexFlatIP(self.width)  # held here: the index does not keep it alive
        self._quantizer.add(self.centroids.numpy())
        index = library.IndexIVFFlat(self._quantizer, self.width, self.lists, library.METRIC_INNER_PRODUCT)
        index.nprobe = PROBES
        index.add_with_ids(rows.numpy(), torch.arange(len(rows)).numpy())
        return index
