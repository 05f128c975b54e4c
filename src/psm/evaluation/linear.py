"""The linear protocol: a linear layer trained by SGD on frozen features, at one rate or at the best of several."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from psm.config.schema import LinearConfig
from psm.data.splits import held_out_mask
from psm.evaluation.accuracy import Accuracy, topk_accuracy
from psm.evaluation.standardize import Standardize
from psm.utils.devices import resident
from psm.utils.schedule import learning_rate
from psm.utils.seeding import generator

HELD_OUT = 0.1  # share of each class that a learning rate is chosen on

Features = Callable[[int], Tensor]  # epoch -> training features (N, F)


@dataclass(frozen=True)
class LinearResult:
    """Test accuracy of the linear layer, the learning rate that it was trained with, and how that was chosen."""

    accuracy: Accuracy
    lr: float
    held_out_top1: dict[float, float] = field(default_factory=dict)  # rate -> percentage; empty where one was given


def linear_accuracy(
    features: Features,
    train_labels: Tensor,
    test: Tensor,
    test_labels: Tensor,
    classes: int,
    config: LinearConfig | None = None,
    seed: int = 0,
    advance: Callable[[int], None] = lambda epoch: None,
    device: torch.device | str = "cpu",
) -> LinearResult:
    """Train a linear layer on standardized features and score it on the test features.

    With ``config.lr_grid`` the learning rate is chosen first: one layer per rate is trained without 10 % of each
    class, all of them at once, and the rate with the best top-1 on these held-out images wins. The layer that is
    scored is then trained anew with that rate on all training images, exactly as if it had been given as ``config.lr``.

    Args:
        features: gives the training features (N, F) of an epoch; they differ between epochs with augmentation.
        train_labels: classes of the training images, (N,).
        test: test features, (M, F).
        test_labels: classes of the test images, (M,).
        classes: number of classes.
        config: epochs, batch size and optimizer of the layer.
        seed: of the initial weights and the order of the images.
        advance: called with the epoch after each epoch of either training.
        device: where to compute.
    """
    config, device = config or LinearConfig(), torch.device(device)
    inputs = _Inputs(features, device)
    training = Training(inputs, train_labels, classes, config, seed, advance)
    lr, held_out_top1 = _choose_lr(training, config.lr_grid or [config.lr])
    layer = training.run([lr])
    return LinearResult(layer.accuracies(inputs.standardize(test.to(device)), test_labels)[0], lr, held_out_top1)


def _choose_lr(training: "Training", grid: Sequence[float]) -> tuple[float, dict[float, float]]:
    """The rate with the best top-1 on held-out training images, the first of equals, and the top-1 of each."""
    rates = list(dict.fromkeys(grid))
    if len(rates) == 1:
        return rates[0], {}
    held = torch.from_numpy(held_out_mask(training.labels.cpu().numpy(), HELD_OUT))
    layers = training.run(rates, (~held).nonzero().flatten())
    rows = held.nonzero().flatten()
    accuracies = layers.accuracies(training.inputs.take(0, rows), training.labels[rows])
    top1 = {rate: accuracy.top1 for rate, accuracy in zip(rates, accuracies, strict=True)}
    return max(rates, key=lambda rate: top1[rate]), top1


class _Inputs:
    """Standardized training features of an epoch, on the device where they fit; the statistics are of epoch 0."""

    def __init__(self, features: Features, device: torch.device):
        self.features, self.device = features, device
        self.source = features(0)
        self.of_first_epoch = Standardize.fit(self.source)
        self.standardize = self.of_first_epoch.to(self.source.new_empty(0, device=device))
        self.epoch, self.current = 0, resident(self.of_first_epoch(self.source), device)

    def of_epoch(self, epoch: int) -> Tensor:
        if epoch != self.epoch:
            source = self.features(epoch)
            if source is not self.source:  # without augmentation every epoch has the same features
                self.current = resident(self.of_first_epoch(source), self.device)
            self.epoch, self.source = epoch, source
        return self.current

    def take(self, epoch: int, rows: Tensor) -> Tensor:
        """The rows of an epoch's features, on the device."""
        current = self.of_epoch(epoch)
        return current.index_select(0, rows.to(current.device)).to(self.device)


@dataclass(frozen=True)
class Layers:
    """Linear layers side by side: one product gives the logits of all of them."""

    weight: Tensor  # (layers * classes, F)
    bias: Tensor  # (layers * classes,)
    classes: int

    @property
    def count(self) -> int:
        return len(self.bias) // self.classes

    @torch.inference_mode()
    def accuracies(self, inputs: Tensor, labels: Tensor) -> list[Accuracy]:
        """The accuracy of each layer on standardized features (N, F)."""
        labels = labels.to(inputs.device)
        parts = zip(self.weight.split(self.classes), self.bias.split(self.classes), strict=True)
        return [topk_accuracy(torch.addmm(bias, inputs, weight.T), labels) for weight, bias in parts]


@dataclass(frozen=True)
class Training:
    """SGD with momentum and a cosine schedule; trains several layers, each at its own rate, as one problem.

    The layers start from the same weights and see the same batches, so that each ends as it would alone.
    """

    inputs: _Inputs
    labels: Tensor  # (N,)
    classes: int
    config: LinearConfig
    seed: int
    advance: Callable[[int], None]

    @torch.no_grad()
    def run(self, rates: Sequence[float], rows: Tensor | None = None) -> Layers:
        """One layer per rate, trained on the images at ``rows`` (all where None)."""
        config, device = self.config, self.inputs.device
        rows = torch.arange(len(self.labels)) if rows is None else rows
        labels = self.labels.to(device)
        layers = self._initial_layers(len(rates))
        momenta = torch.zeros_like(layers.weight), torch.zeros_like(layers.bias)
        lr = torch.tensor(rates, dtype=layers.weight.dtype, device=device).repeat_interleave(self.classes)
        batches = -(-len(rows) // config.batch_size)
        for epoch in range(config.epochs):
            order = rows[torch.randperm(len(rows), generator=generator(self.seed, "linear", epoch))]
            for index, batch in enumerate(order.split(config.batch_size)):
                factor = learning_rate(epoch * batches + index, config.epochs * batches, 0, 1.0, 0.0)
                gradients = _gradients(layers, self.inputs.take(epoch, batch), labels[batch.to(device)])
                parameters = ((layers.weight, lr[:, None]), (layers.bias, lr))
                for (parameter, rate), momentum, gradient in zip(parameters, momenta, gradients, strict=True):
                    gradient = gradient.add_(parameter, alpha=config.weight_decay) if config.weight_decay else gradient
                    momentum.mul_(config.momentum).add_(gradient)
                    parameter.addcmul_(momentum, rate, value=-factor)
            self.advance(epoch)
        return layers

    def _initial_layers(self, count: int) -> Layers:
        shape = self.classes, self.inputs.source.shape[1]
        weight = torch.empty(shape).normal_(std=0.01, generator=generator(self.seed, "linear"))
        place = self.inputs.source.new_empty(0, device=self.inputs.device)
        return Layers(weight.repeat(count, 1).to(place), place.new_zeros(count * self.classes), self.classes)


def _gradients(layers: Layers, inputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of each layer's own mean cross entropy, for standardized features (B, F), by weight and bias."""
    logits = torch.addmm(layers.bias, inputs, layers.weight.T)
    residual = logits.unflatten(1, (layers.count, layers.classes)).softmax(2)
    target = labels[:, None, None].expand(-1, layers.count, 1)
    residual.scatter_add_(2, target, residual.new_full(target.shape, -1.0))
    residual = residual.div_(len(inputs)).flatten(1)
    return residual.T @ inputs, residual.sum(0)
