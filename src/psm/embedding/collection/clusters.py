"""Spherical k-means: clusters of embeddings by cosine similarity."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize

from psm.utils.seeding import generator

STARTS = 4  # of which the best is taken
ROUNDS = 50  # at most
LEAST = 20  # images a cluster
FITTED = 50_000  # rows that the centers are fitted to, at most
BLOCK = 2**14  # rows compared with all centers at a time


class Clusters(NamedTuple):
    """A cluster for each of N rows, the largest cluster first."""

    cluster: Tensor  # (N,)
    similarity: Tensor  # (N,) to the center of the row's own cluster
    number: int  # of clusters


def find_clusters(embeddings: Tensor, most: int, seed: int) -> Clusters:
    """Clusters of rows (N, D).

    Args:
        embeddings: of any length.
        most: number of clusters, fewer where there would be less than LEAST rows for each.
        seed: decides where the centers start.
    """
    count = max(1, min(most, len(embeddings) // LEAST))
    random = generator(seed, "clusters")
    sample = torch.randperm(len(embeddings), generator=random)[:FITTED].sort().values
    rows = normalize(embeddings[sample].float(), dim=1)
    fits = [_fit(rows, _first_centers(rows, count, random)) for _ in range(STARTS)]
    similarity, cluster = _assign(embeddings, max(fits, key=lambda fit: fit[0])[1])
    sizes = cluster.bincount(minlength=count)
    order = sizes.argsort(descending=True, stable=True)
    rank = torch.empty_like(order)
    rank[order] = torch.arange(count)
    return Clusters(rank[cluster], similarity, int((sizes > 0).sum()))


def _fit(rows: Tensor, centers: Tensor) -> tuple[float, Tensor]:
    """Move the centers (K, D) until no row changes its cluster; returns the mean similarity too."""
    before = torch.empty(0)
    for _ in range(ROUNDS):
        similarity, nearest = _assign(rows, centers)
        if torch.equal(nearest, before):
            break
        sums = torch.zeros_like(centers).index_add_(0, nearest, rows)
        used = nearest.bincount(minlength=len(centers)) > 0
        centers = torch.where(used[:, None], normalize(sums, dim=1), centers)
        before = nearest
    return float(similarity.mean()), centers


def _first_centers(rows: Tensor, count: int, random: torch.Generator) -> Tensor:
    """k-means++: each further center is a row drawn by its squared distance to the centers so far."""
    first = int(torch.randint(len(rows), (1,), generator=random))
    chosen = [first]
    distance = (1 - rows @ rows[first]).clamp(min=0)
    for _ in range(count - 1):
        weights = distance if float(distance.sum()) > 0 else torch.ones(len(rows))
        chosen.append(int(torch.multinomial(weights, 1, generator=random)))
        distance = torch.minimum(distance, (1 - rows @ rows[chosen[-1]]).clamp(min=0))
    return rows[chosen].clone()


def _assign(rows: Tensor, centers: Tensor) -> tuple[Tensor, Tensor]:
    """Similarity (N,) to the nearest center, and its number (N,)."""
    found = [(normalize(some.float(), dim=1) @ centers.T).max(1) for some in rows.split(BLOCK)]
    return torch.cat([x.values for x in found]), torch.cat([x.indices for x in found])
