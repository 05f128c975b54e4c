"""Which negatives move a query (figure 2): their gradients by rank of similarity, on a trained run with a bank."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize

from psm.data import ImageDataset
from psm.evaluation.mining_analysis import load_snapshot
from psm.mining.memory_bank import MemoryBank
from psm.mining.negatives import bank_negatives
from psm.utils.errors import UserError
from psm.utils.indices import evenly_spaced
from psm.utils.seeding import generator
from psm.views.transform import Views

RANKS = 200  # as in figure 2
QUERIES = 2048


class NegativeGradients(NamedTuple):
    """Of each query's most similar negatives, most similar first."""

    binary: Tensor  # (N, R) by eq. 2: how the loss changes with the similarity, dL/ds
    softmax: Tensor  # (N, R) the same under InfoNCE (eq. 1)
    turning: Tensor  # (N, R) length of the gradient of s with respect to the query, the right factor of eq. 2
    similarity: Tensor  # (N, R)
    ids: Tensor  # (N, R) of the images that the rows came from
    positive_rank: Tensor  # (N,) 1: the positive is more similar than every negative


@dataclass(frozen=True)
class Rank:
    """One rank, over all queries."""

    rank: int
    similarity: float  # mean
    binary_slope_mean: float
    binary_slope_variance: float
    softmax_slope_mean: float
    softmax_slope_variance: float
    binary_length_mean: float  # slope times turning: the whole gradient's length
    binary_length_variance: float
    softmax_length_mean: float
    softmax_length_variance: float
    same_class: float | None  # share of negatives with the query's label: false negatives; None without labels
    own_image: float  # share of negatives that are the query's own image, seen earlier
    positive_rank: float  # mean over queries, the same in all rows
    positive_rank_median: float
    queries: int


@torch.no_grad()
def negative_gradients(
    query: Tensor,
    key: Tensor,
    bank: MemoryBank,
    temperature: float,
    ranks: int = RANKS,
    exclude_ids: Tensor | None = None,
) -> NegativeGradients:
    """For unit queries (N, D) and their keys (N, D): the gradients of the ``ranks`` most similar bank rows.

    A gradient has two factors, dL/ds and the gradient of s. Eq. 2 takes s, cut off at 0, as the probability that the
    negative is a positive; dL/ds is then s (appendix B). Under InfoNCE it is softmax(s / t) / t. The gradient of s with
    respect to a query of unit length, before it is normalized, has the length sqrt(1 - s^2) in both.
    """
    negatives = bank_negatives(query, bank, exclude_ids)
    similarity = negatives.similarity.masked_fill(~negatives.mask, -torch.inf)
    positive = (query * key).sum(1, keepdim=True)
    log_mass = torch.logsumexp(torch.cat([positive, similarity], 1) / temperature, 1, keepdim=True)
    nearest, places = similarity.topk(ranks, dim=1)
    return NegativeGradients(
        binary=nearest.clamp(min=0),
        softmax=(nearest / temperature - log_mass).exp() / temperature,
        turning=(1 - nearest.square()).clamp(min=0).sqrt(),
        similarity=nearest,
        ids=bank.ids[places],
        positive_rank=1 + (similarity > positive).sum(1),
    )


@torch.inference_mode()
def gradient_ranks(
    checkpoint: Path | str, data: ImageDataset, queries: int = QUERIES, ranks: int = RANKS, batch: int = 256
) -> list[dict[str, Any]]:
    """Mean and variance of the gradients at each rank, for training images in two views as in training.

    The queries are spread evenly over the training images. Where the run lets a query meet its own image in the
    bank (MoCo v2 does), it does so here.
    """
    snapshot = load_snapshot(Path(checkpoint))
    config, method, networks, bank = snapshot.config, snapshot.method, snapshot.networks, snapshot.bank
    if bank is None:
        raise UserError(f"{checkpoint} has no bank to rank negatives of: give a run of mocov2, for example.")
    # No rank may be empty for any query: one that may not meet its own image has as many rows fewer.
    ranks = max(1, min(ranks, bank.fill if method.bank.allow_self else bank.fill // 2))
    views = Views(config.views, data.size, snapshot.views.mean, snapshot.views.std)
    chosen = evenly_spaced(len(data.train), queries)
    parts = []
    for number, ids in enumerate(chosen.split(batch)):
        draws = views.sample_params(len(ids), generator(config.seed, "gradients", number))
        first, second = views.apply(data.train.take(ids), draws)
        query = normalize(networks.predict(networks.projector(networks.encoder(first))), dim=1)
        key = normalize(networks.embed_keys(second), dim=1)
        exclude_ids = None if method.bank.allow_self else ids
        parts.append(negative_gradients(query, key, bank, method.loss.temperature, ranks, exclude_ids))
    joined = NegativeGradients(*(torch.cat(x) for x in zip(*parts, strict=True)))
    return [asdict(rank) for rank in by_rank(joined, chosen, data.train.labels)]


def by_rank(found: NegativeGradients, queries: Tensor, labels: Tensor | None) -> list[Rank]:
    """Means and variances over the queries, given as image ids (N,), at each rank."""
    position = found.positive_rank.double()
    measured = {
        "binary_slope": found.binary,
        "softmax_slope": found.softmax,
        "binary_length": found.binary * found.turning,
        "softmax_length": found.softmax * found.turning,
    }
    means = {f"{name}_mean": values.double().mean(0) for name, values in measured.items()}
    means |= {f"{name}_variance": values.double().var(0, unbiased=False) for name, values in measured.items()}
    own = (found.ids == queries[:, None]).double().mean(0)
    same = None if labels is None else (labels[found.ids] == labels[queries][:, None]).double().mean(0)
    return [
        Rank(
            rank=rank + 1,
            similarity=found.similarity[:, rank].double().mean().item(),
            **{name: values[rank].item() for name, values in means.items()},
            same_class=None if same is None else same[rank].item(),
            own_image=own[rank].item(),
            positive_rank=position.mean().item(),
            positive_rank_median=position.median().item(),
            queries=len(queries),
        )
        for rank in range(found.similarity.shape[1])
    ]
