"""k-means finds clusters that are there; NMI against its definition, its interval against resampling."""

import math
from collections import Counter
from typing import Any

import pytest
import torch

from psm.evaluation.clusters import _lloyd, kmeans, nmi


def blobs(count: Any, classes: Any = 5, noise: Any = 0.1, seed: Any = 0) -> Any:
    random = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % classes
    return torch.eye(8)[labels] + noise * torch.randn(count, 8, generator=random), labels


def slow_nmi(clusters: Any, labels: Any) -> Any:
    def entropy(values: Any) -> Any:
        return -sum(n / len(values) * math.log(n / len(values)) for n in Counter(values).values())

    both = list(zip(clusters, labels, strict=True))
    return 2 * (entropy(clusters) + entropy(labels) - entropy(both)) / (entropy(clusters) + entropy(labels))


def test_kmeans_finds_separate_clusters_whatever_their_scale() -> None:
    features, labels = blobs(200)
    found = kmeans(features * 100, 5, seed=1)
    assert nmi(found.assignments, labels).value == pytest.approx(1.0)
    assert found.inertia < 200 * 0.1


def test_kmeans_is_a_function_of_its_seed_and_leaves_the_global_random_state_alone() -> None:
    features, _ = blobs(150, noise=0.6)
    before = torch.get_rng_state()
    first, second = (kmeans(features, 5, seed=3) for _ in range(2))
    assert torch.equal(first.assignments, second.assignments)
    assert torch.equal(before, torch.get_rng_state())


def test_each_image_is_with_its_nearest_center_and_more_starts_are_not_worse() -> None:
    features, _ = blobs(150, noise=0.6)
    found = kmeans(features, 7, starts=3)
    distances = torch.cdist(torch.nn.functional.normalize(features, dim=1), found.centers)
    assert torch.equal(distances.argmin(1), found.assignments)
    assert kmeans(features, 7, starts=6).inertia <= found.inertia


def test_an_empty_cluster_moves_to_a_far_image() -> None:
    unit = torch.nn.functional.normalize(blobs(50, classes=3)[0], dim=1)
    far = -torch.ones(1, 8)  # nearest to no image
    found = _lloyd(unit, torch.cat([unit[:2], far]), 50)
    assert len(found.assignments.unique()) == 3


def test_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    features, _ = blobs(90, noise=0.5)
    whole = kmeans(features, 4)
    monkeypatch.setattr("psm.evaluation.clusters.MAX_DISTANCES", 4 * 7)
    assert torch.equal(kmeans(features, 4).assignments, whole.assignments)


def test_nmi_is_its_definition() -> None:
    random = torch.Generator().manual_seed(0)
    labels = torch.randint(6, (500,), generator=random)
    clusters = torch.where(torch.rand(500, generator=random) < 0.4, labels, torch.randint(9, (500,), generator=random))
    value, interval = nmi(clusters, labels)
    assert value == pytest.approx(slow_nmi(clusters.tolist(), labels.tolist()))
    assert value in interval
    assert nmi(labels, clusters).value == pytest.approx(value)


def test_nmi_of_extremes() -> None:
    labels = torch.arange(60) % 3
    assert nmi((labels + 1) % 3, labels).value == pytest.approx(1.0)
    assert nmi((labels + 1) % 3, labels).interval.high == 1.0
    assert nmi(torch.zeros(60, dtype=torch.long), labels) == (0.0, (0.0, 0.0))
    assert nmi(torch.arange(60) // 3 % 2, labels).value == pytest.approx(0.0, abs=1e-9)


def test_the_interval_is_that_of_repeated_samples() -> None:
    random = torch.Generator().manual_seed(0)

    def sample() -> Any:
        labels = torch.randint(4, (800,), generator=random)
        keep = torch.rand(800, generator=random) < 0.6
        return nmi(torch.where(keep, labels, torch.randint(4, (800,), generator=random)), labels)

    found = [sample() for _ in range(300)]
    spread = torch.tensor([value for value, _ in found]).std().item()
    half = sum(interval.half_width for _, interval in found) / len(found)
    assert half == pytest.approx(1.96 * spread, rel=0.12)


def test_scikit_learn_says_the_same() -> None:
    metrics = pytest.importorskip("sklearn.metrics")
    random = torch.Generator().manual_seed(1)
    clusters, labels = torch.randint(5, (2, 300), generator=random)
    expected = metrics.normalized_mutual_info_score(labels.numpy(), clusters.numpy())
    assert nmi(clusters, labels).value == pytest.approx(expected)
