"""Channel statistics: those of all images, over a bounded and evenly spaced sample."""

import pytest
import torch

from psm.data.stats import channel_statistics
from psm.utils.errors import UserError


def random_images(count: int, height: int = 32, width: int = 32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, 256, (count, 3, height, width), dtype=torch.uint8, generator=generator)


class Held:
    """The part of a store of images that the statistics need; it remembers what was taken."""

    def __init__(self, images: torch.Tensor) -> None:
        self.images, self.taken = images, []

    def __len__(self) -> int:
        return len(self.images)

    def take(self, indices: torch.Tensor) -> torch.Tensor:
        self.taken += indices.tolist()
        return self.images[indices]


def test_statistics_are_those_of_all_images() -> None:
    images = random_images(250, 6, 5) // torch.tensor([1, 2, 3], dtype=torch.uint8)[:, None, None]
    held = Held(images)
    mean, std = channel_statistics(held)
    pixels = images.double() / 255
    assert mean == pytest.approx(pixels.mean((0, 2, 3)).tolist())
    assert std == pytest.approx(pixels.std((0, 2, 3), unbiased=False).tolist())
    assert held.taken == list(range(250))


def test_statistics_of_many_images_take_evenly_spaced_ones() -> None:
    held = Held(random_images(1000, 2, 2))
    channel_statistics(held, limit=251)
    steps = torch.tensor(held.taken).diff()
    assert len(held.taken) == 251
    assert (held.taken[0], held.taken[-1]) == (0, 999)
    assert steps.min() >= 3
    assert steps.max() <= 4


def test_statistics_of_one_color_can_normalize_and_none_are_refused() -> None:
    mean, std = channel_statistics(Held(torch.full((3, 3, 4, 4), 51, dtype=torch.uint8)))
    assert mean == pytest.approx((0.2, 0.2, 0.2))
    assert std == pytest.approx((1 / 255,) * 3)
    with pytest.raises(UserError, match="no image"):
        channel_statistics(Held(random_images(0)))
