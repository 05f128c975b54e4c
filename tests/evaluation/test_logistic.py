"""Logistic regression: the optimum of its objective, C chosen without the test images."""

from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from psm.evaluation import logistic
from psm.evaluation.logistic import choose_c, fit_logistic, fits, logistic_accuracy


def noisy(count: Any, seed: Any, width: Any = 40, classes: Any = 3) -> Any:
    """Three useful features among many of noise: a weak penalty overfits."""
    random = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % classes
    features = torch.randn(count, width, generator=random)
    features[:, :classes] += 1.2 * torch.eye(classes)[labels]
    return features * torch.linspace(0.1, 30, width) + 5, labels  # scales that standardization must undo


def objective(features: Any, labels: Any, weight: Any, bias: Any, c: Any) -> Any:
    """scikit-learn's: C times the summed cross entropy, plus half the squared norm of the weights."""
    features = features.double()
    inputs = (features - features.mean(0)) / features.std(0)
    return c * cross_entropy(inputs @ weight.T + bias, labels, reduction="sum") + 0.5 * weight.square().sum()


@pytest.mark.parametrize("c", [0.01, 1.0])
def test_the_fit_is_the_minimum_of_the_objective(c: Any) -> None:
    features, labels = noisy(90, 0)
    model = fit_logistic(features, labels, 3, c, dtype=torch.float64)
    assert model.converged
    weight, bias = model.weight.clone().requires_grad_(), model.bias.clone().requires_grad_()
    value = objective(features, labels, weight, bias, c)
    value.backward()
    slope = max(weight.grad.abs().max(), bias.grad.abs().max()) / (c * 90)
    assert slope < 1e-4  # autograd agrees that it is flat there
    for seed in range(5):  # and no step away from it goes down by more than rounding
        step = 0.03 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        assert objective(features, labels, weight + step, bias, c) > value - 1e-6


def test_float32_gives_the_scores_of_float64() -> None:
    (train, labels), (test, _) = noisy(300, 0), noisy(300, 1)
    single, double = (
        fit_logistic(train, labels, 3, 1.0, dtype=dtype)(test) for dtype in (torch.float32, torch.float64)
    )
    assert (single.argmax(1) == double.argmax(1)).float().mean() > 0.98


def test_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    train, labels = noisy(200, 0)
    whole = fit_logistic(train, labels, 3)(train)
    monkeypatch.setattr(logistic, "CHUNK_LOGITS", 3 * 7)
    assert torch.allclose(fit_logistic(train, labels, 3)(train), whole, atol=2e-2)


def test_the_best_c_is_found_on_held_out_training_images() -> None:
    (train, labels), (test, test_labels) = noisy(240, 0), noisy(900, 1)
    grid = (1e-4, 1e-2, 1.0, 100.0)
    result = logistic_accuracy(train, labels, test, test_labels, 3, grid)
    alone = {c: logistic_accuracy(train, labels, test, test_labels, 3, (c,)).accuracy.top1 for c in grid}
    assert result.accuracy.top1 == alone[result.c]
    assert result.accuracy.top1 >= max(alone.values()) - 1.5
    assert result.accuracy.top1 > alone[100.0]
    assert set(result.held_out_top1) == set(grid)
    assert result.accuracy.count == 900


def test_c_does_not_depend_on_the_test_images_or_on_the_order_of_the_grid() -> None:
    train, labels = noisy(120, 0)
    seen = {logistic_accuracy(train, labels, *noisy(60, seed), 3, grid).c for seed, grid in enumerate(((1, 0.01),) * 4)}
    assert len(seen) == 1
    assert choose_c(train, labels, 3, (1, 0.01)) == choose_c(train, labels, 3, (0.01, 1))


def test_few_images_are_each_held_out_once_and_single_ones_never() -> None:
    labels = torch.tensor([0] * 7 + [1] * 5 + [2])
    masks = logistic._held_out(labels)
    assert len(masks) == 5
    assert (sum(mask.int() for mask in masks) == torch.tensor([1] * 12 + [0])).all()
    for mask in masks:
        assert set(labels[~mask].tolist()) == {0, 1, 2}


def test_one_image_a_class_takes_the_middle_of_the_grid() -> None:
    train, labels = noisy(3, 0)
    assert choose_c(train, labels, 3, (0.01, 1.0, 100.0)).c == 1.0
    assert logistic_accuracy(train, labels, *noisy(60, 1), 3).accuracy.top1 > 30


def test_progress_counts_every_fit() -> None:
    train, labels = noisy(60, 0)
    done: list[int] = []
    logistic_accuracy(train, labels, train, labels, 3, (0.1, 1.0), advance=done.append)
    assert sum(done) == fits((0.1, 1.0), 60) == 11
    assert fits((1.0,), 60) == 1
    assert fits((0.1, 1.0), 10_000) == 3


def test_scikit_learn_finds_the_same_weights() -> None:
    linear_model = pytest.importorskip("sklearn.linear_model")
    features, labels = noisy(150, 0)
    ours = fit_logistic(features, labels, 3, 0.3, dtype=torch.float64)
    inputs = ((features - features.mean(0)) / features.std(0)).double().numpy()
    theirs = linear_model.LogisticRegression(C=0.3, tol=1e-8, max_iter=2000).fit(inputs, labels.numpy())
    assert torch.allclose(ours.weight, torch.from_numpy(theirs.coef_), atol=5e-3)
