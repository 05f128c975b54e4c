"""Everything that is computed of a collection, from its embeddings and small copies of its images."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from psm.config.explore import ExploreConfig
from psm.embedding.collection.clusters import Clusters, find_clusters
from psm.embedding.collection.duplicates import SIDE, Duplicates, find_duplicates
from psm.embedding.collection.labels import LabelVotes, vote_on_labels
from psm.embedding.collection.layout import find_layout
from psm.embedding.images import ReadImages
from psm.embedding.index import ImageIndex
from psm.utils.progress import counting_images

OUTLIER_NEIGHBORS = 10  # whose mean similarity says how far an image lies from the others
QUERIES = 1024  # searched at a time


@dataclass(frozen=True)
class Collection:
    """A collection of N images."""

    neighbors: Tensor  # (N, k) rows, most similar first, -1 for none
    similarity: Tensor  # (N, k)
    outlier: Tensor  # (N,) 1 - mean similarity to the nearest images
    outliers: Tensor  # rows of those that lie farthest from all others, farthest first
    clusters: Clusters
    duplicates: Duplicates
    layout: Tensor  # (N, 2) from 0 to 1
    layout_kind: str  # umap or pca
    votes: LabelVotes | None  # None without labels

    @property
    def doubtful(self) -> Tensor:
        """Rows whose label disagrees with their neighbors', the clearest first."""
        if self.votes is None:
            return torch.empty(0, dtype=torch.long)
        rows = self.votes.disagrees.nonzero()[:, 0]
        margin = self.votes.share[rows] - self.votes.own[rows]
        return rows[margin.argsort(descending=True, stable=True)]


def analyze(index: ImageIndex, read: ReadImages, config: ExploreConfig) -> Collection:
    """Analyze a collection.

    Args:
        index: its embeddings.
        read: reads images by their rows at a size, as ``table_images`` gives it.
        config: the settings.
    """
    table, count, shown = index.table, len(index), config.progress
    neighbors, similarity = _neighbors(index, config.neighbors, shown)
    near = similarity[:, :OUTLIER_NEIGHBORS]
    outlier = 1 - torch.where(near > -torch.inf, near, 0.0).sum(1) / (near > -torch.inf).sum(1).clamp(min=1)
    listed = round(config.outliers * count)
    embeddings = torch.from_numpy(table.embeddings)
    pixels, readable = _small_images(read, count, shown)
    with counting_images("comparing near-duplicates", count, shown) as done:
        comparable = neighbors.masked_fill(~readable[neighbors] | ~readable[:, None], -1)
        duplicates = find_duplicates(pixels, comparable, config.match, lambda share: done(round(share * count)))
    with counting_images("clustering", count, shown):
        clusters = find_clusters(embeddings, config.clusters, config.seed)
    with counting_images("drawing the map", count, shown):
        layout, kind = find_layout(embeddings, neighbors, similarity, config.map, config.seed)
    labels = None if table.labels is None else torch.from_numpy(table.labels)
    return Collection(
        neighbors=neighbors,
        similarity=similarity,
        outlier=outlier,
        outliers=outlier.argsort(descending=True, stable=True)[:listed],
        clusters=clusters,
        duplicates=duplicates,
        layout=layout,
        layout_kind=kind,
        votes=None if labels is None or int(labels.max()) < 0 else vote_on_labels(labels, neighbors),
    )


def _neighbors(index: ImageIndex, k: int, shown: bool) -> tuple[Tensor, Tensor]:
    """The nearest other rows (N, k) of each row and their similarities."""
    found = []
    with counting_images("finding neighbors", len(index), shown) as done:
        for start in range(0, len(index), QUERIES):
            rows = list(range(start, min(start + QUERIES, len(index))))
            cosine, near = index.search(index.vectors(rows), k, exclude=rows)
            found.append((torch.from_numpy(near), torch.from_numpy(cosine)))
            done(rows[-1] + 1)
    return torch.cat([near for near, _ in found]), torch.cat([similarity for _, similarity in found])


def _small_images(read: ReadImages, count: int, shown: bool) -> tuple[np.ndarray, Tensor]:
    """All images at SIDE, uint8 (N, 3, SIDE, SIDE), and which of them could be read."""
    pixels = np.zeros((count, 3, SIDE, SIDE), dtype=np.uint8)
    readable = torch.zeros(count, dtype=torch.bool)
    with counting_images("reading small images", count, shown) as done:
        for start in range(0, count, QUERIES):
            rows = range(start, min(start + QUERIES, count))
            for row, image in read(rows, SIDE).items():
                pixels[row], readable[row] = image, True
            done(rows[-1] + 1)
    return pixels, readable
