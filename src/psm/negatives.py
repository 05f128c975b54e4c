"""Which vectors a query is pushed from, and which of them PNSM keeps."""

from typing import NamedTuple

import torch
from torch import Tensor

from psm.objectives import masked_logsumexp


class Negatives(NamedTuple):
    """The candidates of each query: their similarity to it (N, M) and which of them are its negatives (N, M)."""

    similarity: Tensor
    allowed: Tensor


def of_other_images(similarity: Tensor, present: Tensor) -> Negatives:
    """Candidates that belong to the batch's images: all but the query's own image's.

    ``similarity`` (N, N, C): of each query to the C candidates of each image; ``present`` (N, C): which of an image's
    candidates exist.
    """
    count = len(similarity)
    others = ~torch.eye(count, dtype=torch.bool, device=similarity.device)
    return Negatives(similarity.flatten(1), (others[..., None] & present).flatten(1))


@torch.no_grad()
def keep_probability(similarity: Tensor, positive_similarity: Tensor, a: float) -> Tensor:
    """PNSM, eq. 8: p = exp(-a (s(q, n) - s(q, key))^2) for similarities (N, M) and the positive's (N,)."""
    return (similarity - positive_similarity[:, None]).square_().mul_(-a).exp_()


@torch.no_grad()
def mine_negatives(
    similarity: Tensor, positive_similarity: Tensor, a: float, generator: torch.Generator | None = None
) -> Tensor:
    """PNSM, eq. 9: an independent Bernoulli draw for each (query, negative) decides whether it is kept, (N, M)."""
    probability = keep_probability(similarity, positive_similarity, a)
    return torch.rand(probability.shape, generator=generator, device=probability.device) < probability


def log_mass(logits: Tensor, keep: Tensor) -> Tensor:
    """log of the summed exp of each anchor's kept negatives (N,); -inf where none is kept."""
    return masked_logsumexp(logits, keep)
