"""Gradients of a query with respect to its most similar bank rows, by rank of similarity (figure 2)."""

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
from psm.utils.seeding import generator
from psm.views.transform import Views

RANKS = 200  # as in figure 2
QUERIES = 2048


class NegativeGradients(NamedTuple):
    """Gradients of the R most similar negatives of N queries, most similar first."""

    binary: Tensor  # (N, R) dL/ds by eq. 2, s being the similarity of query and negative
    softmax: Tensor  # (N, R) dL/ds under InfoNCE (eq. 1)
    grad_norm: Tensor  # (N, R) norm of the gradient of s with respect to the query, the right factor of eq. 2
    similarity: Tensor  # (N, R)
    ids: Tensor  # (N, R) image ids of the negatives
    positive_rank: Tensor  # (N,) rank of the positive; 1 if it is more similar than every negative


@dataclass(frozen=True)
class Rank:
    """Statistics of one rank over all queries."""

    rank: int
    similarity: float  # mean
    binary_slope_mean: float
    binary_slope_variance: float
    softmax_slope_mean: float
    softmax_slope_variance: float
    binary_length_mean: float  # norm of the whole gradient: dL/ds times the norm of the gradient of s
    binary_length_variance: float
    softmax_length_mean: float
    softmax_length_variance: float
    same_class: float | None  # share of false negatives (of the query's class); None without labels
    own_image: float  # share of negatives that are earlier views of the query's image
    positive_rank: float  # mean over queries, equal for all ranks
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
    """Gradients of the ``ranks`` most similar bank rows of each query.

    A gradient has two factors, dL/ds and the gradient of s. Eq. 2 takes s, clamped at 0, as the probability that the
    negative is a positive; dL/ds is then s (appendix B). Under InfoNCE it is softmax(s / t) / t. The gradient of s with
    respect to a query of unit norm, before it is normalized, has the norm sqrt(1 - s^2) in both.

    Args:
        query: unit-norm queries, (N, D).
        key: unit-norm keys, (N, D).
        bank: the memory bank whose rows are the negatives.
        temperature: t of InfoNCE.
        ranks: how many rows per query.
        exclude_ids: image ids (N,); bank rows of the query's own id are then no negatives.
    """
    negatives = bank_negatives(query, bank, exclude_ids)
    similarity = negatives.similarity.masked_fill(~negatives.mask, -torch.inf)
    positive = (query * key).sum(1, keepdim=True)
    log_sum = torch.logsumexp(torch.cat([positive, similarity], 1) / temperature, 1, keepdim=True)
    nearest, places = similarity.topk(ranks, dim=1)
    return NegativeGradients(
        binary=nearest.clamp(min=0),
        softmax=(nearest / temperature - log_sum).exp() / temperature,
        grad_norm=(1 - nearest.square()).clamp(min=0).sqrt(),
        similarity=nearest,
        ids=bank.ids[places],
        positive_rank=1 + (similarity > positive).sum(1),
    )


@torch.inference_mode()
def gradient_ranks(
    checkpoint: Path | str, data: ImageDataset, queries: int = QUERIES, ranks: int = RANKS, batch: int = 256
) -> list[dict[str, Any]]:
    """Mean and variance of the gradients at each rank, for training images in two random views as in training.

    Bank rows of the query's own image count as negatives if they do in the run (in MoCo v2 they do).

    Args:
        checkpoint: checkpoint of a run with a memory bank.
        data: the data set that the run was trained on.
        queries: number of query images, evenly spaced over the training images.
        ranks: number of ranks.
        batch: images per forward pass.

    Returns:
        A dictionary for each rank, with the fields of ``Rank``.
    """
    snapshot = load_snapshot(Path(checkpoint))
    config, method, networks, bank = snapshot.config, snapshot.method, snapshot.networks, snapshot.bank
    if bank is None:
        raise UserError(f"{checkpoint} has no memory bank to rank negatives of: give a run of mocov2, for example.")
    # No rank may be empty for any query: excluding its own image leaves a query fewer rows.
    ranks = max(1, min(ranks, bank.fill if method.bank.allow_self else bank.fill // 2))
    views = Views(config.views, data.size, snapshot.views.mean, snapshot.views.std)
    chosen = data.train.sample(queries)
    parts = []
    for number, ids in enumerate(chosen.split(batch)):
        draws = views.sample_params(len(ids), generator(config.seed, "gradients", number))
        images = data.train.take(ids)
        first, second = views.apply(images, draws)
        if method.target.views == "weak":
            second = views.apply(images, draws, weak=True)[1]
        query = normalize(networks.predict(networks.projector(networks.encoder(first))), dim=1)
        key = normalize(networks.embed_keys(second), dim=1)
        exclude_ids = None if method.bank.allow_self else ids
        parts.append(negative_gradients(query, key, bank, method.loss.temperature, ranks, exclude_ids))
    joined = NegativeGradients(*(torch.cat(x) for x in zip(*parts, strict=True)))
    return [asdict(rank) for rank in by_rank(joined, chosen, data.train.labels)]


def by_rank(found: NegativeGradients, queries: Tensor, labels: Tensor | None) -> list[Rank]:
    """Statistics at each rank over the queries.

    Args:
        found: gradients of N queries.
        queries: image ids of the queries, (N,).
        labels: classes of all training images, or None.
    """
    position = found.positive_rank.double()
    measured = {
        "binary_slope": found.binary,
        "softmax_slope": found.softmax,
        "binary_length": found.binary * found.grad_norm,
        "softmax_length": found.softmax * found.grad_norm,
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
