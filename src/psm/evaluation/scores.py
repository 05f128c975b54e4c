"""Scores of features: weighted nearest neighbors and the linear protocol. Knows nothing of methods."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize

from psm.config.schema import KnnConfig, LinearConfig
from psm.utils.schedule import learning_rate
from psm.utils.seeding import generator


@dataclass(frozen=True)
class Accuracy:
    """Shares of test images, in per cent, whose class is the first guess or among the first five."""

    top1: float
    top5: float


def accuracy(scores: Tensor, labels: Tensor) -> Accuracy:
    """Of class scores (N, C) and labels (N,)."""
    guesses = scores.topk(min(5, scores.shape[1]), dim=1).indices
    hits = guesses == labels[:, None]
    return Accuracy(100 * hits[:, 0].double().mean().item(), 100 * hits.any(1).double().mean().item())


@torch.inference_mode()
def knn(
    train: Tensor,
    train_labels: Tensor,
    test: Tensor,
    test_labels: Tensor,
    classes: int,
    config: KnnConfig | None = None,
) -> Accuracy:
    """The k most similar training features vote, each with exp(cosine similarity / temperature)."""
    config = config or KnnConfig()
    train, test = normalize(train, dim=1), normalize(test, dim=1)
    k = min(config.k, len(train))
    scores = []
    for rows in test.split(max(1, 2**24 // len(train))):
        similarity, nearest = (rows @ train.T).topk(k, dim=1)
        # Subtracting the largest keeps exp from overflowing at a small temperature; it scales all votes alike.
        weights = ((similarity - similarity[:, :1]) / config.temperature).exp()
        scores.append(weights.new_zeros(len(rows), classes).scatter_add_(1, train_labels[nearest], weights))
    return accuracy(torch.cat(scores), test_labels)


def linear(
    features: Callable[[int], Tensor],
    train_labels: Tensor,
    test: Tensor,
    test_labels: Tensor,
    classes: int,
    config: LinearConfig | None = None,
    seed: int = 0,
    advance: Callable[[int], None] = lambda epoch: None,
) -> Accuracy:
    """One linear layer trained by SGD on frozen features; ``features(epoch)`` gives the training features (N, F).

    Features are standardized by the first epoch's mean and deviation: a fixed affine map, so that the classifier stays
    linear and one learning rate suits encoders of any scale.
    """
    config = config or LinearConfig()
    current = features(0)
    mean, deviation = current.mean(0), current.std(0).clamp(min=1e-6)

    def standardize(x: Tensor) -> Tensor:
        return (x - mean) / deviation

    layer = nn.Linear(current.shape[1], classes)
    with torch.no_grad():
        layer.weight.normal_(std=0.01, generator=generator(seed, "linear"))
        layer.bias.zero_()
    optimizer = torch.optim.SGD(
        layer.parameters(), lr=config.lr, momentum=config.momentum, weight_decay=config.weight_decay, fused=True
    )
    batches = -(-len(train_labels) // config.batch_size)
    for epoch in range(config.epochs):
        inputs = standardize(current if epoch == 0 else features(epoch))
        order = torch.randperm(len(inputs), generator=generator(seed, "linear", epoch))
        inputs, labels = inputs[order], train_labels[order]
        for index, (rows, targets) in enumerate(
            zip(inputs.split(config.batch_size), labels.split(config.batch_size), strict=True)
        ):
            step = epoch * batches + index
            optimizer.param_groups[0]["lr"] = learning_rate(step, config.epochs * batches, 0, config.lr, 0.0)
            optimizer.zero_grad()
            cross_entropy(layer(rows), targets).backward()
            optimizer.step()
        advance(epoch)
    with torch.inference_mode():
        return accuracy(layer(standardize(test)), test_labels)
