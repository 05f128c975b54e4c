"""Which vectors a query is pulled to, and with what weight: its key, or its key and the positives mined for it."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize

from psm.config.schema import WEIGHTINGS
from psm.mining.memory_bank import Mined


class Positives(NamedTuple):
    """Per query P positives, the key first."""

    vectors: Tensor  # (N, P, D), unit norm
    weights: Tensor  # (N, P), no gradient
    present: Tensor  # (N, P), False where nothing was mined


def key_alone(key: Tensor) -> Positives:
    """One positive, the key (N, D), with weight w_0 = 1 (eq. 4)."""
    ones = key.new_ones(len(key), 1)
    return Positives(key[:, None], ones, ones.bool())


def nearest(key: Tensor, mined: Mined) -> Positives:
    """NNCLR: one positive, the bank row nearest to the key; the key itself until the bank holds a usable one."""
    found = mined.found[:, None]
    return key_alone(torch.where(found, mined.vectors[:, 0].to(key.dtype), key.detach()))


def soft_neighbors(projection: Tensor, key: Tensor, mined: Mined, weighting: str = "V0") -> Positives:
    """The key with weight 1 and its k mined positives with soft weights from the query's projection z1 (eq. 5, 6)."""
    vectors = mined.vectors.to(key.dtype)
    similarity = torch.einsum("nd,nkd->nk", normalize(projection.detach(), dim=1), vectors)
    alone = key_alone(key)
    found = mined.found[:, None].expand_as(similarity)
    weights = soft_weights(similarity, weighting).masked_fill(~found, 0.0)
    return Positives(
        torch.cat([alone.vectors, vectors], 1),
        torch.cat([alone.weights, weights], 1),
        torch.cat([alone.present, found], 1),
    )


@torch.no_grad()
def soft_weights(similarity: Tensor, weighting: str = "V0") -> Tensor:
    """w_1..w_k from the similarities (N, k) of the mined positives to z1: eq. 5 and its variants of figure 5.

    V0: softmax, no temperature. V1: those under 1/k set to 0. V2: the k' survivors get 1/k' each. V3: they get 1 each.
    V4: all k get 1.
    """
    if weighting not in WEIGHTINGS:
        raise ValueError(f"weighting {weighting!r} is unknown: choose one of {', '.join(WEIGHTINGS)}")
    k = similarity.shape[1]
    if k == 0 or weighting == "V4":
        return torch.ones_like(similarity)
    weights = similarity.softmax(1)
    # Equal similarities have weights of exactly 1/k but for rounding: they survive.
    survives = (weights >= (1 - 8 * torch.finfo(weights.dtype).eps) / k).to(weights.dtype)
    if weighting == "V1":
        return weights * survives
    if weighting == "V2":
        return survives / survives.sum(1, keepdim=True)
    if weighting == "V3":
        return survives
    return weights
