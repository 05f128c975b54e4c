"""The data of the inspector's page: positives, negatives and metrics of every query at every kept checkpoint."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from psm.data import ImageStore
from psm.evaluation.mining_analysis import Embedded, Mining, embed, load_snapshot, mine, same_class
from psm.methods.spec import MethodSpec
from psm.utils.seeding import generator

BINS = 40  # of the similarity histogram, from -1 to 1
CHUNK = 256  # queries mined at a time, which bounds memory for a large bank


class QueryMetrics(NamedTuple):
    """Metrics of mining for each query, (Q,) each; NaN where undefined."""

    similarity: Tensor  # mean similarity of the mined positives
    kept: Tensor  # mean keep probability of the negatives
    nearer: Tensor  # share of negatives more similar to the query than its key
    purity: Tensor  # share of mined positives of the query's class (figure 1)
    purity_weighted: Tensor  # purity with each positive counted by its weight
    hit: Tensor  # 1 if at least one mined positive is of the query's class (figure 1)
    false_negatives: Tensor  # share of negatives of the query's class
    false_negatives_kept: Tensor  # the same with each negative counted by its keep probability


class SnapshotMining(NamedTuple):
    """Samples mined for Q queries with one checkpoint. Ids are indices of training images."""

    positives: Tensor  # (Q, k) ids, -1 where the bank held too few rows
    positive_similarity: Tensor  # (Q, k)
    weights: Tensor  # (Q, k)
    reference: Tensor  # (Q,) s(q, key), where eq. 8 peaks
    negatives: Tensor  # (Q, n) ids of the negatives shown, most similar first, -1 where there are fewer
    negative_similarity: Tensor  # (Q, n)
    negative_keep: Tensor  # (Q, n) keep probability
    num_negatives: Tensor  # (Q,) all of them
    histogram: Tensor  # (Q, BINS) number of negatives by similarity
    histogram_false: Tensor  # (Q, BINS) those of the query's class, zero without labels
    metrics: QueryMetrics


@dataclass(frozen=True)
class InspectionData:
    """Everything that the page shows except the images."""

    queries: Tensor  # (Q,) ids
    epochs: list[float]
    snapshots: list[SnapshotMining]  # one per epoch
    method: MethodSpec
    labels: Tensor | None  # of all training images


def choose(images: ImageStore, number: int, seed: int, purpose: str) -> Tensor:
    """Sorted ids of at most ``number`` images, drawn by the seed, evenly over classes where labels exist."""
    shuffled = torch.randperm(len(images), generator=generator(seed, purpose))
    if images.labels is not None:
        labels = images.labels[shuffled]
        order = labels.argsort(stable=True)
        sizes = labels.bincount()
        turn = torch.arange(len(labels)) - (sizes.cumsum(0) - sizes).repeat_interleave(sizes)
        shuffled = shuffled[order][turn.argsort(stable=True)]
    return shuffled[:number].sort().values


def collect(
    checkpoints: list[Path],
    images: ImageStore,
    queries: Tensor,
    others: Tensor,
    shown: int,
    encoder: nn.Module | None = None,
    advance: Callable[[int], Any] = lambda count: None,
) -> InspectionData:
    """Mine for the queries with each checkpoint; checkpoints of the same epoch count once.

    Args:
        checkpoints: checkpoints of a run, in any order.
        images: the training images of the run.
        queries: ids of the query images, (Q,).
        others: ids of the images that stand for the rest of a batch.
        shown: negatives shown per query.
        encoder: receives the weights where the run was given a module instead of a name.
        advance: called with the number of images after each batch.
    """
    mined: dict[float, SnapshotMining] = {}
    for checkpoint in checkpoints:
        snapshot = load_snapshot(checkpoint, encoder)
        method = snapshot.method
        if snapshot.epoch in mined:
            advance(len(queries) + len(others))
            continue
        embedded = embed(snapshot, images, queries, advance)
        rest = embed(snapshot, images, others, advance)
        parts = []
        for start in range(0, len(queries), CHUNK):
            chunk = Embedded(*(x[start : start + CHUNK] for x in embedded))
            parts.append(summarize(mine(snapshot, chunk, rest), images.labels, shown))
        mined[snapshot.epoch] = _concatenate(parts)
    epochs = sorted(mined)
    return InspectionData(queries, epochs, [mined[epoch] for epoch in epochs], method, images.labels)


@torch.inference_mode()
def summarize(mining: Mining, labels: Tensor | None, shown: int) -> SnapshotMining:
    """Reduce a mining to the negatives shown, histograms of all negatives, and metrics."""
    false = torch.zeros_like(mining.allowed)
    if labels is not None:
        false = mining.allowed & same_class(labels, mining.queries, mining.negatives)
    places = shown_negatives(mining, shown)
    present = places >= 0
    return SnapshotMining(
        positives=mining.positives,
        positive_similarity=mining.positive_similarity,
        weights=mining.weights,
        reference=mining.reference,
        negatives=mining.negatives[places.clamp(min=0)].masked_fill(~present, -1) if places.numel() else places,
        negative_similarity=mining.similarity.gather(1, places.clamp(min=0)).masked_fill(~present, 0.0),
        negative_keep=mining.keep.gather(1, places.clamp(min=0)).masked_fill(~present, 0.0),
        num_negatives=mining.allowed.sum(1),
        histogram=_histogram(mining.similarity, mining.allowed),
        histogram_false=_histogram(mining.similarity, false),
        metrics=query_metrics(mining, labels, false),
    )


def query_metrics(mining: Mining, labels: Tensor | None, false: Tensor) -> QueryMetrics:
    """Metrics of each query; ``false`` (Q, C) marks the negatives of its own class."""
    found = (mining.positives >= 0).float()
    allowed, keep = mining.allowed.float(), mining.keep * mining.allowed
    undefined = torch.full((len(mining.queries),), torch.nan)
    nearer = (mining.similarity > mining.reference[:, None]).float() * allowed
    unlabeled = QueryMetrics(
        similarity=_weighted_mean(mining.positive_similarity, found),
        kept=_weighted_mean(mining.keep, allowed),
        nearer=_weighted_mean(nearer, allowed),
        purity=undefined,
        purity_weighted=undefined,
        hit=undefined,
        false_negatives=undefined,
        false_negatives_kept=undefined,
    )
    if labels is None:
        return unlabeled
    true = same_class(labels, mining.queries, mining.positives).float() * found
    purity = _weighted_mean(true, found)
    return unlabeled._replace(
        purity=purity,
        purity_weighted=_weighted_mean(true, mining.weights * found),
        hit=torch.where(purity.isnan(), torch.nan, (purity > 0).float()),
        false_negatives=_weighted_mean(false.float(), allowed),
        false_negatives_kept=_weighted_mean(false.float(), keep),
    )


def shown_negatives(mining: Mining, number: int) -> Tensor:
    """Candidates to show, (Q, number), most similar first: half the hardest, half evenly spaced over the rest.

    -1 where there are fewer. A bank row that is a negative several times, mined by several images, is shown once.
    """
    if not mining.allowed.shape[1]:
        return torch.zeros(len(mining.queries), 0, dtype=torch.long)
    ranked, order = mining.similarity.masked_fill(~mining.allowed, -torch.inf).sort(1, descending=True)
    ids = mining.negatives[order]
    hidden = ranked.isinf()
    hidden[:, 1:] |= (ids[:, 1:] == ids[:, :-1]) & (ranked[:, :-1] - ranked[:, 1:] < 1e-6)
    order = order.gather(1, hidden.int().argsort(dim=1, stable=True))
    left = (~hidden).sum(1, keepdim=True)
    hardest = number // 2
    rest = torch.linspace(0, 1, number - hardest) * (left - 1 - hardest).clamp(min=0)
    places = torch.cat([torch.arange(hardest).expand(len(order), -1), hardest + rest.round().long()], 1)
    usable = places < left
    usable[:, 1:] &= places[:, 1:] != places[:, :-1]
    return order.gather(1, places.clamp(max=order.shape[1] - 1)).masked_fill(~usable, -1)


def worst_positives(metrics: QueryMetrics) -> Tensor:
    """Queries (Q,) ordered from the worst mined positives to the best.

    With labels: the lowest weighted purity first, and among equals the most similar positives first. Without labels:
    the least similar positives first.
    """
    similarity = metrics.similarity.nan_to_num(torch.inf)
    purity = metrics.purity_weighted.where(~metrics.purity_weighted.isnan(), metrics.purity)
    if purity.isnan().all():
        return similarity.argsort(stable=True)
    by_similarity = similarity.argsort(descending=True, stable=True)
    return by_similarity[purity.nan_to_num(torch.inf)[by_similarity].argsort(stable=True)]


def worst_negatives(metrics: QueryMetrics) -> Tensor:
    """Queries (Q,) ordered from the worst negatives to the best.

    With labels: the largest kept share of false negatives first. Without labels: the most negatives nearer than the
    key first.
    """
    share = metrics.false_negatives_kept
    share = metrics.nearer if share.isnan().all() else share
    return share.nan_to_num(-torch.inf).argsort(descending=True, stable=True)


def metric_means(metrics: QueryMetrics) -> dict[str, float | None]:
    """Mean of each metric over the queries where it is defined; None if it is nowhere."""
    return {name: None if x.isnan().all() else float(x.nanmean()) for name, x in metrics._asdict().items()}


def _weighted_mean(values: Tensor, weights: Tensor) -> Tensor:
    """Weighted mean of each row, (Q,); NaN where all weights are zero."""
    total = weights.sum(1)
    return torch.where(total > 0, (values * weights).sum(1) / total, torch.nan)


def _histogram(similarity: Tensor, counted: Tensor) -> Tensor:
    """Histogram (Q, BINS) of the similarities (Q, C) that are ``counted`` (Q, C)."""
    bins = ((similarity + 1) / 2 * BINS).long().clamp(0, BINS - 1)
    return torch.zeros(len(similarity), BINS, dtype=torch.long).scatter_add_(1, bins, counted.long())


def _concatenate(parts: list[SnapshotMining]) -> SnapshotMining:
    """Chunks of queries as one."""
    metrics = QueryMetrics(*(torch.cat(values) for values in zip(*(part.metrics for part in parts), strict=True)))
    names = [name for name in SnapshotMining._fields if name != "metrics"]
    tensors = {name: torch.cat([getattr(part, name) for part in parts]) for name in names}
    return SnapshotMining(**tensors, metrics=metrics)
