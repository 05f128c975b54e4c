"""RankMe and LiDAR against their definitions, their intervals against resampling."""

from typing import Any

import pytest
import torch

from psm.evaluation.ranks import lidar, rankme


def random(*shape: Any, seed: Any = 0) -> Any:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def entropy_rank(spectrum: Any) -> Any:
    shares = spectrum / spectrum.sum() + 1e-7
    return float(torch.exp(-(shares * shares.log()).sum()))


def slow_lidar(views: Any, delta: Any) -> Any:
    n, q, width = views.shape
    means = [sum(views[i]) / q for i in range(n)]
    center = sum(means) / n
    between = sum(torch.outer(m - center, m - center) for m in means) / (n - 1)
    within = delta * torch.eye(width, dtype=views.dtype)
    for i in range(n):
        for j in range(q):
            within = within + torch.outer(views[i, j] - means[i], views[i, j] - means[i]) / (n * (q - 1))
    values, vectors = torch.linalg.eigh(within)
    root = vectors @ torch.diag(values**-0.5) @ vectors.T
    return entropy_rank(torch.linalg.eigvalsh(root @ between @ root).clamp(min=0))


def test_rankme_is_the_entropy_of_the_singular_values() -> None:
    features = random(300, 12) * torch.logspace(0, -6, 12, dtype=torch.float64) + 0.3  # not centered
    assert rankme(features).value == pytest.approx(entropy_rank(torch.linalg.svdvals(features)), rel=1e-6)


def test_rankme_of_known_matrices() -> None:
    assert rankme(torch.eye(8).repeat(10, 1)).value == pytest.approx(8, rel=1e-4)
    assert rankme(torch.ones(50, 8)).value == pytest.approx(1, abs=1e-3)
    assert rankme(random(30, 5) @ random(5, 64)).value < 5.1  # of rank five, in more dimensions than images
    assert rankme(torch.zeros(10, 4)).value == pytest.approx(1, abs=1e-3)


def test_rankme_does_not_depend_on_the_scale() -> None:
    features = random(200, 6)
    assert rankme(features * 1e4).value == pytest.approx(rankme(features).value)


def test_lidar_is_the_rank_of_the_lda_matrix() -> None:
    views = random(20, 1, 6) * torch.tensor([3.0, 2, 1, 0.3, 0.1, 0]) + 0.5 * random(20, 5, 6, seed=1)
    for delta in (1e-4, 0.1):
        assert lidar(views, delta).value == pytest.approx(slow_lidar(views, delta), rel=1e-6)


def test_lidar_counts_what_tells_images_apart_and_not_what_views_vary_in() -> None:
    image = torch.cat([random(400, 1, 3), torch.zeros(400, 1, 5, dtype=torch.float64)], 2)
    noise = torch.cat([torch.zeros(400, 8, 3, dtype=torch.float64), random(400, 8, 5, seed=1)], 2)
    views = image + noise + 0.05 * random(400, 8, 8, seed=2)
    assert lidar(views).value == pytest.approx(3, abs=0.2)
    assert rankme(views.flatten(0, 1)).value > 7


@pytest.mark.parametrize("measure", ["rankme", "lidar"])
def test_the_intervals_are_those_of_resampled_images(measure: Any) -> None:
    scale = torch.tensor([4.0, 2, 1, 1, 0.5, 0.2], dtype=torch.float64)
    images = random(300, 1, 6) * scale
    views = images + 0.5 * random(300, 4, 6, seed=1)
    data, function = (views, lidar) if measure == "lidar" else (views[:, 0], rankme)
    value, interval = function(data)
    draws = torch.Generator().manual_seed(0)
    resampled = torch.tensor([function(data[torch.randint(300, (300,), generator=draws)]).value for _ in range(300)])
    assert interval.half_width == pytest.approx(1.96 * resampled.std().item(), rel=0.15)
    assert value in interval


def test_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    views = random(30, 3, 5)
    whole = rankme(views[:, 0]), lidar(views)
    monkeypatch.setattr("psm.evaluation.ranks.CHUNK", 7)
    assert rankme(views[:, 0]).value == pytest.approx(whole[0].value)
    assert lidar(views).interval == pytest.approx(whole[1].interval)
