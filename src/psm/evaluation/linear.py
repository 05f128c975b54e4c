"""The linear protocol: one linear layer trained by SGD on frozen features."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear

from psm.config.schema import LinearConfig
from psm.data.splits import held_out_mask
from psm.evaluation.accuracy import Accuracy, topk_accuracy
from psm.evaluation.standardize import Standardize
from psm.utils.schedule import learning_rate
from psm.utils.seeding import generator

HELD_OUT = 0.1  # share of each class that a learning rate is chosen on

Features = Callable[[int], Tensor]  # epoch -> training features (N, F)


@dataclass(frozen=True)
class LinearResult:
    """Test accuracy of the linear layer, and the learning rate that it was trained with."""

    accuracy: Accuracy
    lr: float


def linear_accuracy(
    features: Features,
    train_labels: Tensor,
    test: Tensor,
    test_labels: Tensor,
    classes: int,
    config: LinearConfig | None = None,
    seed: int = 0,
    advance: Callable[[int], None] = lambda epoch: None,
) -> LinearResult:
    """Train a linear layer on standardized features and score it on the test features.

    With ``config.lr_grid`` the learning rate is chosen first: one layer per rate is trained without 10 % of each
    class, and the rate with the best top-1 on these held-out images wins. The layer that is scored is then trained
    with that rate on all training images, exactly as if it had been given as ``config.lr``.

    Args:
        features: gives the training features (N, F) of an epoch; they differ between epochs with augmentation.
        train_labels: classes of the training images, (N,).
        test: test features, (M, F).
        test_labels: classes of the test images, (M,).
        classes: number of classes.
        config: epochs, batch size and optimizer of the layer.
        seed: of the initial weights and the order of the images.
        advance: called with the epoch after each epoch of either training.
    """
    config = config or LinearConfig()
    first = features(0)
    standardize = Standardize.fit(first)

    def inputs(epoch: int) -> Tensor:
        return standardize(first if epoch == 0 else features(epoch))

    lr = config.lr
    if config.lr_grid:
        lr = config.lr_grid[0]
        if len(config.lr_grid) > 1:
            lr = _choose_lr(inputs, train_labels, classes, config, seed, advance)
    (layer,) = _train(inputs, train_labels, None, classes, [lr], config, seed, advance)
    with torch.inference_mode():
        return LinearResult(topk_accuracy(layer(standardize(test)), test_labels), lr)


def _choose_lr(
    inputs: Features,
    labels: Tensor,
    classes: int,
    config: LinearConfig,
    seed: int,
    advance: Callable[[int], None],
) -> float:
    """The rate of ``config.lr_grid`` with the best top-1 on held-out training images; the first of equals."""
    rates = config.lr_grid or [config.lr]
    held = torch.from_numpy(held_out_mask(labels.numpy(), HELD_OUT))
    layers = _train(inputs, labels, (~held).nonzero().flatten(), classes, rates, config, seed, advance)
    with torch.inference_mode():
        rows = inputs(0)[held]
        top1 = [topk_accuracy(layer(rows), labels[held]).top1 for layer in layers]
    return rates[top1.index(max(top1))]


def _train(
    inputs: Features,
    labels: Tensor,
    rows: Tensor | None,
    classes: int,
    rates: Sequence[float],
    config: LinearConfig,
    seed: int,
    advance: Callable[[int], None],
) -> list[nn.Linear]:
    """One layer per learning rate, all trained in one pass over the images at ``rows`` (all where None).

    The layers start from the same weights and see the same batches; their weights are stacked into one product.
    """
    labels = labels if rows is None else labels[rows]
    layers: list[nn.Linear] = []
    batches = -(-len(labels) // config.batch_size)
    for epoch in range(config.epochs):
        current = inputs(epoch) if rows is None else inputs(epoch)[rows]
        if not layers:
            layers = [_initial_layer(current.shape[1], classes, seed) for _ in rates]
            optimizer = _optimizer(layers, rates, config)
        order = torch.randperm(len(current), generator=generator(seed, "linear", epoch))
        shuffled = zip(current[order].split(config.batch_size), labels[order].split(config.batch_size), strict=True)
        for index, (batch, targets) in enumerate(shuffled):
            step = epoch * batches + index
            for group, lr in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = learning_rate(step, config.epochs * batches, 0, lr, 0.0)
            optimizer.zero_grad()
            _loss(layers, batch, targets).backward()
            optimizer.step()
        advance(epoch)
    return layers


def _initial_layer(width: int, classes: int, seed: int) -> nn.Linear:
    layer = nn.Linear(width, classes)
    with torch.no_grad():
        layer.weight.normal_(std=0.01, generator=generator(seed, "linear"))
        layer.bias.zero_()
    return layer


def _optimizer(layers: Sequence[nn.Linear], rates: Sequence[float], config: LinearConfig) -> torch.optim.SGD:
    groups = [{"params": layer.parameters(), "lr": lr} for layer, lr in zip(layers, rates, strict=True)]
    return torch.optim.SGD(groups, momentum=config.momentum, weight_decay=config.weight_decay, fused=True)


def _loss(layers: Sequence[nn.Linear], batch: Tensor, targets: Tensor) -> Tensor:
    """Sum over the layers of their mean cross entropy: each layer's gradient is that of its own loss."""
    weight, bias = (torch.cat([getattr(layer, name) for layer in layers]) for name in ("weight", "bias"))
    logits = linear(batch, weight, bias).unflatten(1, (len(layers), -1))  # (B, layers, classes)
    return torch.stack([cross_entropy(scores, targets) for scores in logits.unbind(1)]).sum()
