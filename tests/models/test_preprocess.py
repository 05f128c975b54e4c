"""`encoder.preprocess`: the same inputs from a path, an image, an array and a tensor, and the refusals."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import psm
from helpers import save_untrained_encoder
from psm.utils.errors import UserError


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return psm.load_encoder(save_untrained_encoder(tmp_path_factory.mktemp("run")))


@pytest.fixture
def image() -> Any:
    coarse = np.random.default_rng(0).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((40, 30), Image.Resampling.BICUBIC)


def by_hand(encoder: Any, image: Any) -> Any:
    """Central square, resized by Pillow, normalized."""
    square = image.resize((16, 16), Image.Resampling.LANCZOS, box=(5, 0, 35, 30))
    pixels = torch.from_numpy(np.array(square)).permute(2, 0, 1) / 255
    mean, std = (torch.tensor(x).view(3, 1, 1) for x in (encoder.info.mean, encoder.info.std))
    return (pixels - mean) / std


def test_every_kind_of_image_gives_the_same_input(encoder: Any, image: Any, tmp_path: Path) -> None:
    expected = by_hand(encoder, image)
    image.save(tmp_path / "image.png")
    array = np.array(image)
    tensor = torch.from_numpy(array).permute(2, 0, 1)
    kinds = [tmp_path / "image.png", str(tmp_path / "image.png"), image, array, array.transpose(2, 0, 1), tensor]
    for kind in (*kinds, tensor / 255, array / 255):
        given = encoder.preprocess(kind)
        assert given.shape == (3, 16, 16)
        assert torch.allclose(given, expected, atol=1e-5)
    several = encoder.preprocess(kinds)
    assert several.shape == (6, 3, 16, 16)
    assert encoder(several).shape == (6, encoder.width)
    assert encoder.preprocess(np.stack([array, array])).shape == (2, 3, 16, 16)
    assert encoder.preprocess(torch.stack([tensor] * 3)).shape == (3, 3, 16, 16)
    assert encoder.preprocess([]).shape == (0, 3, 16, 16)


def test_an_image_that_a_camera_turned_is_upright(encoder: Any, image: Any, tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was held upright
    image.transpose(Image.Transpose.ROTATE_90).save(tmp_path / "turned.png", exif=exif)
    with Image.open(tmp_path / "turned.png") as opened:
        for given in (tmp_path / "turned.png", opened):
            # Resized before it was turned: rounded otherwise, by at most one of 255 steps.
            assert torch.allclose(encoder.preprocess(given), by_hand(encoder, image), atol=1.01 / 255 / 0.2)


def test_what_is_no_image_is_refused(encoder: Any, tmp_path: Path) -> None:
    (tmp_path / "text.png").write_text("no image")
    for given, says in (
        (tmp_path / "text.png", r"text.png cannot be read as an image: not an image"),
        (tmp_path / "none.png", r"none.png cannot be read as an image: No such file"),
        (torch.full((3, 8, 8), 2.0), "float values from 2 to 2"),
        ([object()], "no image: give tensors"),
    ):
        with pytest.raises(UserError, match=says):
            encoder.preprocess(given)
    with pytest.raises(UserError, match=r"load one with psm\.load_encoder"):
        psm.create_encoder("tiny").preprocess(tmp_path / "text.png")
