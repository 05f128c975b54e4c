"""The generated shapes: the same everywhere, hard for pixels, easy for a network."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from psm.config.schema import ImagesConfig
from psm.data import load_dataset
from psm.data import synthetic_shapes as shapes


@pytest.fixture(scope="module")
def whole() -> Any:
    return load_dataset("shapes", progress=False)


def all_of(images: Any) -> Any:
    return images.take(torch.arange(len(images)))


def test_counts_classes_and_balance(whole: Any) -> None:
    assert (len(whole.train), len(whole.test), whole.size) == (5000, 2000, 32)
    assert len(whole.classes) == len(set(whole.classes)) == 10
    assert torch.bincount(whole.train.labels).tolist() == [500] * 10
    assert torch.bincount(whole.test.labels).tolist() == [200] * 10


def test_every_image_is_one_of_a_kind(whole: Any) -> None:
    rows = np.concatenate([all_of(whole.train).flatten(1).numpy(), all_of(whole.test).flatten(1).numpy()])
    assert len(np.unique(rows, axis=0)) == 7000


def test_a_limit_gives_the_first_images_and_may_exceed_the_default(whole: Any) -> None:
    fewer = load_dataset("shapes", ImagesConfig(limit=333), progress=False)
    more = load_dataset("shapes", ImagesConfig(limit=5300), progress=False)
    assert (len(fewer.train), len(fewer.test), len(more.train)) == (333, 2000, 5300)
    assert torch.equal(all_of(fewer.train), all_of(whole.train)[:333])
    assert torch.equal(all_of(more.train)[:5000], all_of(whole.train))
    assert torch.equal(all_of(fewer.test), all_of(whole.test))


def test_other_sizes_show_the_same_shapes() -> None:
    """At twice the size, and averaged back, the images are the same up to noise and anti-aliasing."""
    small = shapes.block("train", 0, 32).astype(float)
    large = shapes.block("train", 0, 64).astype(float)
    back = large.reshape(-1, 3, 32, 2, 32, 2).mean(axis=(3, 5))
    assert np.abs(back - small).mean() < 8
    assert np.abs(back[1:] - small[:-1]).mean() > 40


def test_pixels_are_pinned() -> None:
    """The exact values: they may not depend on the machine, the number of threads or the version of a library."""
    assert np.add.reduce(shapes.block("train", 0, 32), axis=None, dtype=np.int64) == 48_222_179
    assert shapes.block("test", 3, 32)[5, :, 16, 16].tolist() == [28, 48, 57]


def test_polygon_distance_against_a_dense_outline() -> None:
    corners = ((0.0, -1.0), (0.95, 0.75), (0.1, 0.2), (-0.95, 0.75))
    field = shapes._polygon(*corners)
    outline = []
    for (x0, y0), (x1, y1) in zip(corners, corners[1:] + corners[:1], strict=True):
        outline += [(x0 + (x1 - x0) * t / 2000, y0 + (y1 - y0) * t / 2000) for t in range(2000)]
    generator = np.random.default_rng(0)
    for x, y in generator.uniform(-1.3, 1.3, (60, 2)):
        nearest = min(math.hypot(x - a, y - b) for a, b in outline)
        angles = [math.atan2(b - y, a - x) for a, b in outline]
        winding = sum(
            (n - m + math.pi) % (2 * math.pi) - math.pi for m, n in zip(angles, angles[1:] + angles[:1], strict=True)
        )
        expected = -nearest if abs(winding) > math.pi else nearest
        got = field(np.full((1, 1, 1), x, dtype=np.float32), np.full((1, 1, 1), y, dtype=np.float32)).item()
        assert got == pytest.approx(expected, abs=2e-3)


def test_shape_and_background_differ_in_luminance() -> None:
    shape, background, _ = shapes._colors(np.random.default_rng(3), 4000)
    weights = np.array([0.299, 0.587, 0.114])
    difference = shape @ weights - background @ weights
    assert np.abs(difference).min() > 0.399
    assert 0.45 < (difference > 0).mean() < 0.55
    assert 0 <= min(shape.min(), background.min()) <= max(shape.max(), background.max()) <= 1


def test_neighbors_in_pixels_do_not_solve_it(whole: Any) -> None:
    train, test = (all_of(part).flatten(1).float() for part in (whole.train, whole.test))
    nearest = torch.cdist(test, train).topk(5, largest=False).indices
    votes = nn.functional.one_hot(whole.train.labels[nearest], 10).sum(dim=1)
    accuracy = (votes.argmax(dim=1) == whole.test.labels).float().mean().item()
    assert 0.12 < accuracy < 0.45


@pytest.mark.slow
def test_a_small_network_solves_it(whole: Any) -> None:
    torch.manual_seed(0)

    def layer(width_in: Any, width_out: Any, stride: Any) -> Any:
        convolution = nn.Conv2d(width_in, width_out, 3, stride, 1, bias=False)
        return nn.Sequential(convolution, nn.BatchNorm2d(width_out), nn.ReLU())

    network = nn.Sequential(
        *(layer(3, 24, 1), layer(24, 32, 2), layer(32, 48, 1), layer(48, 64, 2), layer(64, 96, 2)),
        *(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(384, 10)),
    )
    optimizer = torch.optim.SGD(network.parameters(), 0.1, momentum=0.9, nesterov=True, weight_decay=5e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=8 * 40)
    for _ in range(8):
        for indices in torch.randperm(5000).split(125):
            images = whole.train.take(indices).float() / 255
            shift = torch.randint(-3, 4, (2,)).tolist()
            images = images.roll(shift, (2, 3)) if torch.rand(()) < 0.5 else images.flip(-1).roll(shift, (2, 3))
            loss = nn.functional.cross_entropy(network(images), whole.train.labels[indices])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    network.eval()
    with torch.no_grad():
        right = network(all_of(whole.test).float() / 255).argmax(dim=1) == whole.test.labels
    assert right.float().mean() > 0.85
