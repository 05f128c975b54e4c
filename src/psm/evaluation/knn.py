"""Weighted k-nearest-neighbor classification of frozen features."""

import torch
from torch import Tensor
from torch.nn.functional import normalize

from psm.config.schema import KnnConfig
from psm.evaluation.accuracy import Accuracy, topk_accuracy

MAX_SIMILARITIES = 2**24  # similarities held at a time, which bounds memory


@torch.inference_mode()
def knn_accuracy(
    train: Tensor,
    train_labels: Tensor,
    test: Tensor,
    test_labels: Tensor,
    classes: int,
    config: KnnConfig | None = None,
) -> Accuracy:
    """Classify test features by the k most similar training features, each voting exp(cosine similarity / T).

    Args:
        train: training features, (N, F).
        train_labels: their classes, (N,).
        test: test features, (M, F).
        test_labels: their classes, (M,).
        classes: number of classes.
        config: k and the temperature T.
    """
    config = config or KnnConfig()
    train, test = normalize(train, dim=1), normalize(test, dim=1)
    k = min(config.k, len(train))
    scores = []
    for rows in test.split(max(1, MAX_SIMILARITIES // len(train))):
        similarity, nearest = (rows @ train.T).topk(k, dim=1)
        # Subtracting the largest keeps exp from overflowing at a small temperature; it scales all votes alike.
        weights = ((similarity - similarity[:, :1]) / config.temperature).exp()
        scores.append(weights.new_zeros(len(rows), classes).scatter_add_(1, train_labels[nearest], weights))
    return topk_accuracy(torch.cat(scores), test_labels)
