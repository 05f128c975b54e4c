"""The map of a collection: two coordinates for each embedding, by UMAP where it is installed, else by PCA."""

import importlib.util
import warnings

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

from psm.utils.errors import UserError

FEWEST = 16  # rows from which on UMAP is used
NEIGHBORS = 15  # UMAP's n_neighbors, the row itself included
BLOCK = 2**14


def find_layout(embeddings: Tensor, neighbors: Tensor, similarity: Tensor, kind: str, seed: int) -> tuple[Tensor, str]:
    """Coordinates (N, 2) from 0 to 1, near for similar rows, and the kind that was used.

    Args:
        embeddings: (N, D).
        neighbors: (N, k) rows, nearest first, -1 for none.
        similarity: (N, k) their cosine similarities.
        kind: umap, pca or auto.
        seed: decides where UMAP starts.
    """
    installed = importlib.util.find_spec("umap") is not None
    if kind == "umap" and not installed:
        raise UserError("map=umap needs umap-learn: pip install 'psm[umap]', or use map=pca.")
    used = "pca" if kind == "pca" or not installed or len(embeddings) < FEWEST else "umap"
    flat = _umap(embeddings, neighbors, similarity, seed) if used == "umap" else _pca(embeddings)
    low, high = flat.amin(0), flat.amax(0)
    return (flat - low) / (high - low).clamp(min=1e-12), used


def _umap(embeddings: Tensor, neighbors: Tensor, similarity: Tensor, seed: int) -> Tensor:
    """UMAP of the graph of neighbors, which are known already; in it each row is its own nearest."""
    near = neighbors[:, : NEIGHBORS - 1]
    own = torch.arange(len(near))[:, None]
    distance = (1 - similarity[:, : NEIGHBORS - 1]).clamp(min=0).masked_fill(near < 0, torch.inf)
    graph = (torch.cat([own, near], 1).numpy(), torch.cat([torch.zeros(len(near), 1), distance], 1).numpy())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of threads, which the seed makes it do without, and of new data
        import umap

        reducer = umap.UMAP(
            n_neighbors=graph[0].shape[1], min_dist=0.1, metric="cosine", random_state=seed, precomputed_knn=graph
        )
        return torch.from_numpy(np.asarray(reducer.fit_transform(embeddings.float().numpy()), dtype=np.float32))


def _pca(embeddings: Tensor) -> Tensor:
    """The first two principal components of the rows at length 1."""
    width = embeddings.shape[1]
    mean, square = torch.zeros(width, dtype=torch.float64), torch.zeros(width, width, dtype=torch.float64)
    for some in embeddings.split(BLOCK):
        rows = normalize(some.double(), dim=1)
        mean += rows.sum(0)
        square += rows.T @ rows
    mean /= len(embeddings)
    axes = torch.linalg.eigh(square / len(embeddings) - mean.outer(mean)).eigenvectors.flip(1)[:, :2]
    axes = axes * axes.sum(0).sign()  # an eigenvector's sign means nothing: the same one on every machine
    flat = torch.cat([(normalize(some.double(), dim=1) - mean) @ axes for some in embeddings.split(BLOCK)]).float()
    return flat if flat.shape[1] == 2 else torch.cat([flat, torch.zeros(len(flat), 2 - flat.shape[1])], 1)
