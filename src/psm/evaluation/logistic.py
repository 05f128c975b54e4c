"""Multinomial logistic regression on frozen features by L-BFGS: convex, so there is no learning rate to choose.

The objective is scikit-learn's: the cross entropy of all images times C plus half the squared norm of the weights (the
bias is free), on standardized features. C is chosen on held-out training images.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from psm.config.evaluation import LogisticConfig
from psm.data.splits import class_ranks, held_out_mask
from psm.evaluation.accuracy import Accuracy, topk_accuracy
from psm.evaluation.standardize import Standardize
from psm.utils.devices import resident

C_GRID = tuple(LogisticConfig().c_grid)
HELD_OUT = 0.1  # share of each class that C is chosen on, where there are many images
FOLDS = 5  # with few images each is held out once
FEW_IMAGES = 2_000
MAX_ITERATIONS = 500
TOLERANCE = 1e-4  # of the largest entry of the gradient of the mean cross entropy, as in scikit-learn
CHUNK_LOGITS = 2**22  # logits held at a time, which bounds memory


@dataclass(frozen=True)
class LogisticModel:
    """A fitted classifier: logits (N, classes) of features (N, F)."""

    weight: Tensor  # (classes, F), of standardized features
    bias: Tensor  # (classes,)
    standardize: Standardize
    c: float
    converged: bool

    def __call__(self, features: Tensor) -> Tensor:
        """Logits (N, classes) on the model's device."""
        chunks = features.split(max(1, CHUNK_LOGITS // len(self.bias)))
        return torch.cat([self.standardize(rows.to(self.weight)) @ self.weight.T + self.bias for rows in chunks])


@dataclass(frozen=True)
class LogisticResult:
    """Test accuracy of logistic regression, and how its C was chosen."""

    accuracy: Accuracy
    c: float
    held_out_top1: dict[float, float]  # C -> percentage of held-out training images; empty where C was given
    converged: bool


def logistic_accuracy(
    train: Tensor,
    train_labels: Tensor,
    test: Tensor,
    test_labels: Tensor,
    classes: int,
    grid: Sequence[float] = C_GRID,
    device: torch.device | str = "cpu",
    advance: Callable[[int], None] = lambda count: None,
) -> LogisticResult:
    """Choose C on held-out training images, fit on all training images, score on the test images.

    Args:
        train: training features, (N, F).
        train_labels: their classes, (N,).
        test: test features, (M, F).
        test_labels: their classes, (M,).
        classes: number of classes.
        grid: values of C to choose from; a single one is taken without a choice.
        device: where to compute.
        advance: called with 1 after each of ``fits(grid, N)`` fits.
    """
    chosen = choose_c(train, train_labels, classes, grid, device, advance)
    model = fit_logistic(train, train_labels, classes, chosen.c, device)
    advance(1)
    accuracy = topk_accuracy(model(test), test_labels.to(model.weight.device))
    return LogisticResult(accuracy, chosen.c, chosen.held_out_top1, model.converged)


def fits(grid: Sequence[float], count: int) -> int:
    """How many fits ``logistic_accuracy`` makes on so many training images, at most."""
    return 1 if len(grid) == 1 else 1 + len(grid) * (FOLDS if count <= FEW_IMAGES else 1)


@dataclass(frozen=True)
class ChosenC:
    """A value of C, and the top-1 accuracy of each candidate on held-out training images."""

    c: float
    held_out_top1: dict[float, float]


def choose_c(
    features: Tensor,
    labels: Tensor,
    classes: int,
    grid: Sequence[float] = C_GRID,
    device: torch.device | str = "cpu",
    advance: Callable[[int], None] = lambda count: None,
) -> ChosenC:
    """The best C on held-out images of (N, F).

    Of many images 10 % of each class are held out, and the C with the best top-1 on them wins. Of at most 2,000 each is
    held out once, in five folds, and the lowest cross entropy wins: so few are too few to compare accuracies. A class
    with one image is never held out; where that leaves none to choose on, the middle of the grid is taken.
    """
    candidates = sorted(set(grid))
    if len(candidates) == 1:
        return ChosenC(candidates[0], {})
    splits = [held for held in _held_out(labels) if held.any()]
    if not splits:
        return ChosenC(candidates[len(candidates) // 2], {})
    right, loss, count = dict.fromkeys(candidates, 0), dict.fromkeys(candidates, 0.0), 0
    for held in splits:
        test, test_labels = features[held], labels[held].to(device)
        count += len(test_labels)
        start: LogisticModel | None = None
        for c in candidates:  # from the strongest penalty on: each start is near the next solution
            start = fit_logistic(features[~held], labels[~held], classes, c, device, start)
            logits = start(test)
            right[c] += int((logits.argmax(1) == test_labels).sum())
            loss[c] += float(torch.nn.functional.cross_entropy(logits, test_labels, reduction="sum"))
            advance(1)
    few = len(labels) <= FEW_IMAGES
    best = min(candidates, key=lambda c: (loss[c], -right[c]) if few else (-right[c], loss[c]))
    return ChosenC(best, {c: 100 * right[c] / count for c in candidates})


def _held_out(labels: Tensor) -> list[Tensor]:
    """Masks (N,) of the images to hold out, one for each split."""
    classes = labels.cpu().numpy()
    if len(labels) > FEW_IMAGES:
        return [torch.from_numpy(held_out_mask(classes, HELD_OUT))]
    ranks = torch.from_numpy(class_ranks(classes, len(labels), "folds"))
    single = (labels.cpu().bincount() == 1)[labels.cpu()]
    return [(ranks % FOLDS == fold) & ~single for fold in range(FOLDS)]


def fit_logistic(
    features: Tensor,
    labels: Tensor,
    classes: int,
    c: float = 1.0,
    device: torch.device | str = "cpu",
    start: LogisticModel | None = None,
    dtype: torch.dtype = torch.float32,
) -> LogisticModel:
    """Fit on all the given images.

    Args:
        features: (N, F).
        labels: (N,).
        classes: number of classes.
        c: weight of the data against the penalty, as in scikit-learn.
        device: where to compute; the features are copied there where they fit, else chunk by chunk.
        start: another fit to start from.
        dtype: float32 gives the test scores of float64 (docs/evaluation.md has the measurement).
    """
    device = torch.device(device)
    standardize = Standardize.fit(features)
    inputs = resident(standardize(features).to(dtype), device)
    targets = labels.to(device)
    weight = torch.zeros(classes, features.shape[1], dtype=dtype, device=device)
    bias = torch.zeros(classes, dtype=dtype, device=device)
    if start is not None:  # its weights are of features standardized by other statistics, which hardly differ
        weight.copy_(start.weight)
        bias.copy_(start.bias)
    weight.requires_grad_()
    bias.requires_grad_()
    objective = _Objective(inputs, targets, weight, bias, 1 / (c * len(labels)))
    optimizer = torch.optim.LBFGS(
        [weight, bias],
        max_iter=MAX_ITERATIONS,
        tolerance_grad=TOLERANCE,
        tolerance_change=0.0,
        history_size=20,
        line_search_fn="strong_wolfe",
    )
    optimizer.step(objective)
    objective()
    largest = max(float(x.grad.abs().max()) for x in (weight, bias) if x.grad is not None)
    return LogisticModel(weight.detach(), bias.detach(), standardize.to(weight.detach()), c, largest <= TOLERANCE)


class _Objective:
    """The penalized mean cross entropy as a closure of torch's optimizers; writes the gradients, chunk by chunk."""

    def __init__(self, inputs: Tensor, targets: Tensor, weight: Tensor, bias: Tensor, penalty: float):
        self.inputs, self.targets, self.weight, self.bias, self.penalty = inputs, targets, weight, bias, penalty
        self.rows = max(1, CHUNK_LOGITS // len(bias))

    @torch.no_grad()
    def __call__(self) -> Tensor:
        count = len(self.inputs)
        grad_weight = self.weight * self.penalty
        grad_bias = torch.zeros_like(self.bias)
        loss = 0.5 * self.penalty * self.weight.square().sum()
        for rows, targets in zip(self.inputs.split(self.rows), self.targets.split(self.rows), strict=True):
            rows = rows.to(self.weight.device)
            log_shares = torch.addmm(self.bias, rows, self.weight.T).log_softmax(1)
            loss -= log_shares.gather(1, targets[:, None]).sum() / count
            residual = log_shares.exp_().div_(count)  # the gradient with respect to the logits
            residual.scatter_add_(1, targets[:, None], residual.new_full((len(targets), 1), -1 / count))
            grad_weight.addmm_(residual.T, rows)
            grad_bias += residual.sum(0)
        self.weight.grad, self.bias.grad = grad_weight, grad_bias
        return loss
