"""What the networks give for the views of a batch, and the directed pairs that losses compare."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize


class Embeddings(NamedTuple):
    """Outputs of the networks for V views of N images (two, usually), (V, N, D) each, view first; not normalized."""

    projection: Tensor  # z: projections of the online network
    query: Tensor  # q: predictions of the online network, z without predictor
    key: Tensor  # k: projections of the target network, z without target


class ViewPair(NamedTuple):
    """One direction of a batch: queries from one view, keys from the other; unit norm, (N, D) each."""

    query: Tensor
    key: Tensor
    projection: Tensor  # z1, online projection of the query's view: weights the mined positives (eq. 5)
    query_view_key: Tensor  # key network's projection of the query's view: a negative for other images (eq. 4)


def directions(views: int, symmetric: bool = True) -> list[tuple[int, int]]:
    """Views of queries and keys: every ordered pair of views; if not symmetric, from the first view alone."""
    pairs = [(a, b) for a in range(views) for b in range(views) if a != b]
    return pairs if symmetric else [pair for pair in pairs if pair[0] == 0]


def view_pairs(embeddings: Embeddings, symmetric: bool = True) -> Iterator[ViewPair]:
    """The directed pairs of a batch, in the order of ``directions``: view 1 to view 2 and, if symmetric, back.

    Half precision is converted to float32 before the vectors are normalized.
    """
    projection, query, key = _unit_norm(embeddings)
    for query_view, key_view in directions(len(query), symmetric):
        yield ViewPair(query[query_view], key[key_view], projection[query_view], key[query_view])


def joined_pairs(embeddings: Embeddings, symmetric: bool = True) -> ViewPair:
    """The same as one pair: the rows of each direction follow those of the one before."""
    projection, query, key = _unit_norm(embeddings)
    query_views, key_views = zip(*directions(len(query), symmetric), strict=True)
    query, projection, query_view_key = (_rows_of_views(x, query_views) for x in (query, projection, key))
    return ViewPair(query, _rows_of_views(key, key_views), projection, query_view_key)


def mean_keys(key: Tensor) -> Tensor:
    """One key (N, D) of each image: the mean of the keys (V, N, D) of its views, unit norm, without gradient."""
    return normalize(_unit(key.detach()).mean(0), dim=-1)


def _unit_norm(embeddings: Embeddings) -> Embeddings:
    return Embeddings(*(_unit(x) for x in embeddings))


def _unit(x: Tensor) -> Tensor:
    return normalize(x.float() if x.dtype in (torch.bfloat16, torch.float16) else x, dim=-1)


def _rows_of_views(values: Tensor, views: Sequence[int]) -> Tensor:
    """Rows (len(views) N, D) of some views, one after another, of the values (V, N, D)."""
    if list(views) == list(range(len(values))):
        return values.flatten(0, 1)
    return torch.cat([values[view] for view in views])
