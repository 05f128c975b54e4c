"""The numbers behind the inspector's page: what every query was pulled to and pushed from, at every epoch kept."""

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

BINS = 40  # of the similarity axis, from -1 to 1
CHUNK = 256  # queries mined at once: bounds memory where the negatives are a large bank


class Scores(NamedTuple):
    """How mining went for each query, (Q,) each; not a number where there is nothing to say."""

    similarity: Tensor  # of the mined positives, their mean
    kept: Tensor  # probability that a negative is kept, the mean
    nearer: Tensor  # share of negatives that are more similar to the query than its key
    purity: Tensor  # share of mined positives of the query's class (figure 1)
    purity_weighted: Tensor  # the same, each counting as much as its weight
    any: Tensor  # whether at least one of them is (figure 1)
    false_negatives: Tensor  # share of negatives of the query's class
    false_negatives_kept: Tensor  # the same, each counting as much as its probability to be kept


class Epoch(NamedTuple):
    """What was mined for Q queries with one checkpoint. Ids are indices of training images."""

    positives: Tensor  # (Q, k) ids, -1 where the bank held too few rows
    positive_similarity: Tensor  # (Q, k)
    weights: Tensor  # (Q, k)
    reference: Tensor  # (Q,) s(q, key), where eq. 8 peaks
    negatives: Tensor  # (Q, n) ids of the negatives shown, most similar first, -1 where there are fewer
    negative_similarity: Tensor  # (Q, n)
    count: Tensor  # (Q,) all negatives
    spread: Tensor  # (Q, BINS) how many negatives lie where on the similarity axis
    spread_false: Tensor  # (Q, BINS) those of the query's class, zero without labels
    scores: Scores


@dataclass(frozen=True)
class Facts:
    """Everything the page shows but the images."""

    queries: Tensor  # (Q,) ids
    epochs: list[float]
    moments: list[Epoch]
    method: MethodSpec
    labels: Tensor | None


def choose(images: ImageStore, number: int, seed: int, purpose: str) -> Tensor:
    """Ids of at most ``number`` images, sorted: drawn by the seed, evenly over classes where labels exist."""
    shuffled = torch.randperm(len(images), generator=generator(seed, purpose))
    if images.labels is not None:
        labels = images.labels[shuffled]
        order = labels.argsort(stable=True)
        sizes = labels.bincount()
        turn = torch.arange(len(labels)) - (sizes.cumsum(0) - sizes).repeat_interleave(sizes)
        shuffled = shuffled[order][turn.argsort(stable=True)]
    return shuffled[:number].sort().values


def gather(
    checkpoints: list[Path],
    images: ImageStore,
    queries: Tensor,
    others: Tensor,
    shown: int,
    encoder: nn.Module | None = None,
    advance: Callable[[int], Any] = lambda count: None,
) -> Facts:
    """Mine for the queries with each checkpoint, earliest first; those of the same moment count once."""
    kept: dict[float, Epoch] = {}
    for checkpoint in checkpoints:
        moment = load_snapshot(checkpoint, encoder)
        method = moment.method
        if moment.epoch in kept:
            advance(len(queries) + len(others))
            continue
        of, rest = embed(moment, images, queries, advance), embed(moment, images, others, advance)
        parts = []
        for start in range(0, len(queries), CHUNK):
            few = Embedded(*(x[start : start + CHUNK] for x in of))
            parts.append(summary(mine(moment, few, rest), images.labels, shown))
        kept[moment.epoch] = _joined(parts)
    epochs = sorted(kept)
    return Facts(queries, epochs, [kept[epoch] for epoch in epochs], method, images.labels)


@torch.inference_mode()
def summary(mining: Mining, labels: Tensor | None, shown: int) -> Epoch:
    """A mining reduced to what is shown of it: some negatives, how all of them spread, and the scores."""
    false = torch.zeros_like(mining.allowed)
    if labels is not None:
        false = mining.allowed & same_class(labels, mining.queries, mining.negatives)
    places = shown_negatives(mining, shown)
    present = places >= 0
    return Epoch(
        positives=mining.positives,
        positive_similarity=mining.positive_similarity,
        weights=mining.weights,
        reference=mining.reference,
        negatives=mining.negatives[places.clamp(min=0)].masked_fill(~present, -1) if places.numel() else places,
        negative_similarity=mining.similarity.gather(1, places.clamp(min=0)).masked_fill(~present, 0.0),
        count=mining.allowed.sum(1),
        spread=_histogram(mining.similarity, mining.allowed),
        spread_false=_histogram(mining.similarity, false),
        scores=scores(mining, labels, false),
    )


def scores(mining: Mining, labels: Tensor | None, false: Tensor) -> Scores:
    """How mining went for each query; ``false`` (Q, C) marks the negatives of its own class."""
    found = (mining.positives >= 0).float()
    allowed, keep = mining.allowed.float(), mining.keep * mining.allowed
    unknown = torch.full((len(mining.queries),), torch.nan)
    nearer = (mining.similarity > mining.reference[:, None]).float() * allowed
    blind = Scores(
        similarity=_share(mining.positive_similarity, found),
        kept=_share(mining.keep, allowed),
        nearer=_share(nearer, allowed),
        purity=unknown,
        purity_weighted=unknown,
        any=unknown,
        false_negatives=unknown,
        false_negatives_kept=unknown,
    )
    if labels is None:
        return blind
    true = same_class(labels, mining.queries, mining.positives).float() * found
    purity = _share(true, found)
    return blind._replace(
        purity=purity,
        purity_weighted=_share(true, mining.weights * found),
        any=torch.where(purity.isnan(), torch.nan, (purity > 0).float()),
        false_negatives=_share(false.float(), allowed),
        false_negatives_kept=_share(false.float(), keep),
    )


def shown_negatives(mining: Mining, number: int) -> Tensor:
    """Places (Q, number) among the candidates, most similar first: the hardest, then as many evenly over the rest.

    -1 stands where there are fewer. The same bank row may be a negative several times over, mined by several other
    images: it is shown once.
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


def worst_positives(scores: Scores) -> Tensor:
    """Queries (Q,) from the worst mined positives to the best.

    With labels: the smallest share of weight on the query's class first, and among equals the most similar positives,
    which are wrong with the greatest confidence. Without: the least similar positives.
    """
    similarity = scores.similarity.nan_to_num(torch.inf)
    purity = scores.purity_weighted.where(~scores.purity_weighted.isnan(), scores.purity)
    if purity.isnan().all():
        return similarity.argsort(stable=True)
    by_similarity = similarity.argsort(descending=True, stable=True)
    return by_similarity[purity.nan_to_num(torch.inf)[by_similarity].argsort(stable=True)]


def worst_negatives(scores: Scores) -> Tensor:
    """Queries (Q,) from the worst negatives to the best.

    With labels: the largest kept share of false negatives first. Without: the most negatives nearer than the key.
    """
    failing = scores.false_negatives_kept
    failing = scores.nearer if failing.isnan().all() else failing
    return failing.nan_to_num(-torch.inf).argsort(descending=True, stable=True)


def means(scores: Scores) -> dict[str, float | None]:
    """The scores over all queries for which there is something to say."""
    return {name: None if x.isnan().all() else float(x.nanmean()) for name, x in scores._asdict().items()}


def _share(values: Tensor, weights: Tensor) -> Tensor:
    """The weighted mean of each row, not a number where the weights are all zero."""
    total = weights.sum(1)
    return torch.where(total > 0, (values * weights).sum(1) / total, torch.nan)


def _histogram(similarity: Tensor, counted: Tensor) -> Tensor:
    bins = ((similarity + 1) / 2 * BINS).long().clamp(0, BINS - 1)
    return torch.zeros(len(similarity), BINS, dtype=torch.long).scatter_add_(1, bins, counted.long())


def _joined(parts: list[Epoch]) -> Epoch:
    """Chunks of queries as one."""
    *columns, scored = zip(*parts, strict=True)
    return Epoch(*map(torch.cat, columns), Scores(*map(torch.cat, zip(*scored, strict=True))))
