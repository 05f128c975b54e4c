"""Weighted k-nearest-neighbor classification of frozen features: one search for all k and temperatures."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import normalize

from psm.config.schema import KnnConfig
from psm.evaluation.accuracy import Accuracy, topk_accuracy

MAX_SIMILARITIES = 2**24  # similarities held at a time, which bounds memory
TRAIN_BLOCK_BYTES = 2**29  # training features on the device at a time


def knn_accuracy(
    train: Tensor,
    train_labels: Tensor,
    test: Tensor,
    test_labels: Tensor,
    classes: int,
    config: KnnConfig | None = None,
    device: torch.device | str = "cpu",
) -> Accuracy:
    """The accuracy of the first k and temperature of ``config``; arguments as of `knn_accuracies`."""
    return knn_accuracies(train, train_labels, test, test_labels, classes, config, device)[0][2]


@torch.inference_mode()
def knn_accuracies(
    train: Tensor,
    train_labels: Tensor,
    test: Tensor,
    test_labels: Tensor,
    classes: int,
    config: KnnConfig | None = None,
    device: torch.device | str = "cpu",
    advance: Callable[[int], None] = lambda count: None,
) -> list[tuple[int, float, Accuracy]]:
    """Classify test features by the k most similar training features, each voting exp(cosine similarity / T).

    The neighbors are searched once, for the largest k.

    Args:
        train: training features, (N, F).
        train_labels: their classes, (N,).
        test: test features, (M, F).
        test_labels: their classes, (M,).
        classes: number of classes.
        config: one or several k and temperatures T.
        device: where to compute.
        advance: called with the number of test images after each chunk of the search; as often for each image as there
            are blocks of training features.

    Returns:
        k (at most N), T and the accuracy of every combination, in the order of the lists, k first.
    """
    config, device = config or KnnConfig(), torch.device(device)
    counts = list(dict.fromkeys(min(k, len(train)) for k in config.counts))
    similarity, nearest = nearest_neighbors(train, test, max(counts), device, advance)
    votes = train_labels.to(device)[nearest]
    labels = test_labels.to(device)
    return [
        (k, temperature, topk_accuracy(_scores(similarity[:, :k], votes[:, :k], classes, temperature), labels))
        for k in counts
        for temperature in dict.fromkeys(config.temperatures)
    ]


@torch.inference_mode()
def knn_scores(
    train: Tensor, train_labels: Tensor, test: Tensor, classes: int, k: int = 20, temperature: float = 0.1
) -> Tensor:
    """Votes (M, classes) for each test feature, of one k and temperature; arguments as of `knn_accuracies`."""
    similarity, nearest = nearest_neighbors(train, test, min(k, len(train)), test.device)
    return _scores(similarity, train_labels[nearest], classes, temperature)


def nearest_neighbors(
    train: Tensor,
    test: Tensor,
    k: int,
    device: torch.device,
    advance: Callable[[int], None] = lambda count: None,
) -> tuple[Tensor, Tensor]:
    """Cosine similarities (M, k) of each test feature to its k most similar training features, and their rows (M, k).

    Training features go to the device block by block, so that memory does not grow with their number.
    """
    best: tuple[Tensor, Tensor] | None = None
    for first, block in _blocks(train):
        rows = normalize(block.to(device), dim=1)
        chunks = test.split(max(1, MAX_SIMILARITIES // len(rows)))
        found = []
        for chunk in chunks:
            similarity = normalize(chunk.to(device), dim=1) @ rows.T
            found.append(similarity.topk(min(k, len(rows)), dim=1))
            advance(len(chunk))
        values, places = (torch.cat(column) for column in zip(*found, strict=True))
        places = places + first
        if best is not None:
            values, places = torch.cat([best[0], values], 1), torch.cat([best[1], places], 1)
            values, order = values.topk(min(k, values.shape[1]), dim=1)
            places = places.gather(1, order)
        best = values, places
    assert best is not None
    return best


def _blocks(train: Tensor) -> list[tuple[int, Tensor]]:
    """Blocks of rows with the index of their first."""
    step = max(1, TRAIN_BLOCK_BYTES // (train.shape[1] * train.element_size()))
    return [(first, train[first : first + step]) for first in range(0, len(train), step)]


def searches(train: Tensor, test: Tensor) -> int:
    """What ``advance`` counts up to."""
    return len(_blocks(train)) * len(test)


def _scores(similarity: Tensor, votes: Tensor, classes: int, temperature: float) -> Tensor:
    """Sum of the votes for each class, (M, classes), of neighbors (M, k), the most similar first."""
    # Subtracting the largest keeps exp from overflowing at a small temperature; it scales all votes alike.
    weights = ((similarity - similarity[:, :1]) / temperature).exp()
    return weights.new_zeros(len(votes), classes).scatter_add_(1, votes, weights)
