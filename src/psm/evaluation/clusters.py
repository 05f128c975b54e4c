"""k-means on unit features, and how much its clusters say of the classes (NMI)."""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize, one_hot

from psm.evaluation.intervals import CONFIDENCE, Interval
from psm.utils.devices import resident
from psm.utils.seeding import generator
from psm.utils.statistics import normal_quantile

MAX_DISTANCES = 2**24  # held at a time, which bounds memory


class Clustering(NamedTuple):
    """A cluster for each of N images, and the sum of squared distances to the centers."""

    assignments: Tensor  # (N,)
    centers: Tensor  # (k, F)
    inertia: float


@torch.inference_mode()
def kmeans(
    features: Tensor,
    k: int,
    starts: int = 5,
    iterations: int = 100,
    seed: int = 0,
    device: torch.device | str = "cpu",
    advance: Callable[[int], None] = lambda count: None,
) -> Clustering:
    """k-means (Lloyd) on unit-norm features from k-means++ starts; the start that ends with the least inertia.

    Args:
        features: (N, F); normalized here.
        k: number of clusters, at most N.
        starts: how many starts.
        iterations: of each start, at most; it ends where no image changes its cluster.
        seed: decides the starts.
        device: where to compute if the features fit there, else where they are.
        advance: called with 1 after each start.
    """
    unit = resident(normalize(features.float(), dim=1), torch.device(device))
    best: Clustering | None = None
    for start in range(starts):
        found = _lloyd(unit, _plus_plus(unit, k, generator(seed, "k-means", start)), iterations)
        best = found if best is None or found.inertia < best.inertia else best
        advance(1)
    assert best is not None
    return best


def _plus_plus(unit: Tensor, k: int, draws: torch.Generator) -> Tensor:
    """Centers (k, F): each an image drawn with a chance that grows with its squared distance to those before it."""
    chosen = [int(torch.randint(len(unit), (), generator=draws))]
    distance = _squared_distances(unit, unit[chosen]).flatten()
    for _ in range(1, k):
        chances = distance.double().cpu().cumsum(0)
        place = torch.rand((), generator=draws, dtype=torch.float64) * chances[-1]
        chosen.append(min(int(torch.searchsorted(chances, place)), len(unit) - 1))
        distance = torch.minimum(distance, _squared_distances(unit, unit[chosen[-1:]]).flatten())
    return unit[chosen]


def _squared_distances(unit: Tensor, centers: Tensor) -> Tensor:
    return (1 + centers.square().sum(1) - 2 * unit @ centers.T).clamp_(min=0)


def _lloyd(unit: Tensor, centers: Tensor, iterations: int) -> Clustering:
    assignments, distances = _assign(unit, centers)
    for _ in range(iterations):
        centers = _means(unit, assignments, distances, centers)
        before = assignments
        assignments, distances = _assign(unit, centers)
        if torch.equal(before, assignments):
            break
    return Clustering(assignments.cpu(), centers.cpu(), distances.sum().item())


def _assign(unit: Tensor, centers: Tensor) -> tuple[Tensor, Tensor]:
    """The nearest center of each image, and the squared distance to it."""
    chunks = unit.split(max(1, MAX_DISTANCES // len(centers)))
    nearest = [_squared_distances(chunk, centers).min(1) for chunk in chunks]
    distances, assignments = (torch.cat(column) for column in zip(*nearest, strict=True))
    return assignments, distances


def _means(unit: Tensor, assignments: Tensor, distances: Tensor, centers: Tensor) -> Tensor:
    """The mean of each cluster; an empty one moves to the image that is farthest from its center."""
    sums, counts = torch.zeros_like(centers), centers.new_zeros(len(centers))
    step = max(1, MAX_DISTANCES // len(centers))
    for rows, members in zip(unit.split(step), assignments.split(step), strict=True):
        belongs = one_hot(members, len(centers)).to(unit.dtype)  # as a product: the same result on every run
        sums += belongs.T @ rows
        counts += belongs.sum(0)
    means = sums / counts.clamp(min=1)[:, None]
    empty = (counts == 0).nonzero().flatten()
    if len(empty):
        means[empty] = unit[distances.topk(len(empty)).indices]
    return means


class NormalizedMutualInformation(NamedTuple):
    """NMI of two labelings, 0 to 1, with its 95 % interval."""

    value: float
    interval: Interval


def nmi(clusters: Tensor, labels: Tensor, confidence: float = CONFIDENCE) -> NormalizedMutualInformation:
    """2 I(clusters; labels) / (H(clusters) + H(labels)) of N images, as scikit-learn's default.

    The interval is for the sampling of the images, by the influence of each image on the value (delta method); the
    clusters are taken as given. Zero where one of the labelings has a single value.
    """
    count, width = len(labels), int(labels.max()) + 1
    table = torch.bincount(clusters.cpu() * width + labels.cpu(), minlength=(int(clusters.max()) + 1) * width)
    joint = table.double().view(-1, width) / count
    # -log of the probability of each image's cluster, class and both; zero where there are no images.
    surprise = [_surprise(joint.sum(1))[:, None], _surprise(joint.sum(0))[None, :], _surprise(joint)]
    of_clusters, of_labels, of_both = ((joint * values).sum().item() for values in surprise)
    entropies, shared = of_clusters + of_labels, of_clusters + of_labels - of_both
    if of_clusters <= 0 or of_labels <= 0:
        return NormalizedMutualInformation(0.0, Interval(0.0, 0.0))
    value = 2 * shared / entropies
    marginal = surprise[0] + surprise[1] - entropies
    influence = 2 * ((marginal - (surprise[2] - of_both)) - shared / entropies * marginal) / entropies
    spread = math.sqrt(max(0.0, (joint * influence.square()).sum().item()) / count)
    half = normal_quantile(confidence) * spread
    return NormalizedMutualInformation(value, Interval(max(0.0, value - half), min(1.0, value + half)))


def _surprise(probabilities: Tensor) -> Tensor:
    return -probabilities.clamp(min=1e-300).log().masked_fill(probabilities == 0, 0.0)
