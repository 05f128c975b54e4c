"""The preparation of images in an exported graph: Pillow's center square and Lanczos filter, for every size."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from psm.data.decode import center_square
from psm.exporting.graph import Preprocess, lanczos_matrix

MEAN, STD = [0.49, 0.48, 0.45], [0.25, 0.24, 0.26]


def smooth_image(height: int, width: int, seed: int = 0) -> Image.Image:
    random = np.random.default_rng(seed)
    small = random.integers(0, 256, (height // 6 + 2, width // 6 + 2, 3), dtype=np.uint8)
    return Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)


def levels(prepared: torch.Tensor) -> torch.Tensor:
    """Inputs of an encoder back to values from 0 to 255."""
    return (prepared * torch.tensor(STD).view(3, 1, 1) + torch.tensor(MEAN).view(3, 1, 1)) * 255


def pixels(image: Image.Image) -> torch.Tensor:
    return torch.from_numpy(np.array(image).transpose(2, 0, 1))


@settings(max_examples=40)
@given(st.integers(8, 150), st.integers(8, 150), st.integers(8, 64))
def test_it_prepares_images_as_pillow_does(height: int, width: int, size: int) -> None:
    """To one level of 255 in few pixels where Pillow works columns first, which it does unless the image is tall."""
    image = smooth_image(height, width)
    expected = pixels(center_square(image, size)).float()
    got = levels(Preprocess(size, MEAN, STD)(pixels(image)[None])[0])
    difference = (got - expected).abs()
    if height <= width and size != min(height, width):
        assert difference.max() < 1.01
        assert (difference > 0.5).float().mean() < 0.01
    assert difference.mean() < 0.5


def test_an_image_of_the_encoders_size_is_only_normalized() -> None:
    images = torch.randint(0, 256, (2, 3, 24, 24), dtype=torch.uint8)
    prepared = Preprocess(24, MEAN, STD)(images)
    assert torch.equal(levels(prepared).round().to(torch.uint8), images)
    by_hand = (images / 255 - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1)
    torch.testing.assert_close(prepared, by_hand)


@pytest.mark.parametrize(("length", "side", "size"), [(5, 5, 9), (64, 64, 8), (101, 64, 32), (4001, 3000, 224)])
def test_weights_sum_to_one_and_are_those_of_the_definition(length: int, side: int, size: int) -> None:
    weights = lanczos_matrix(length, side, size, torch.device("cpu")).double()
    assert torch.allclose(weights.sum(1), torch.ones(size, dtype=torch.float64), atol=1e-6)
    ratio, lobe = side / size, max(side / size, 1)
    at = (np.arange(length)[None] + 0.5 - (length - side) / 2 - (np.arange(size)[:, None] + 0.5) * ratio) / lobe
    plain = np.where(np.abs(at) < 3, np.sinc(at) * np.sinc(at / 3), 0)
    plain /= plain.sum(1, keepdims=True)
    assert np.abs(weights.numpy() - plain).max() < 1e-6
