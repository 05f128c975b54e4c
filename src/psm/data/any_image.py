"""An image as users have it (a path, a PIL image, an array, a tensor) as a square of uint8 pixels."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps

from psm.data import decode
from psm.data.from_torch import rgb_image
from psm.data.names import printable
from psm.utils.errors import UserError


def square_pixels(image: Any, size: int) -> np.ndarray:
    """The central square of an image at ``size``, uint8 (3, size, size).

    Args:
        image: a path, a PIL image, a tensor (C, H, W) or (H, W), or an array (H, W), (H, W, C) or (C, H, W), with 1, 3
            or 4 channels, uint8 or float in [0, 1].
        size: side in pixels.
    """
    if isinstance(image, (str, os.PathLike)):
        try:
            return decode.decode(Path(image).expanduser(), size)
        except decode.Unreadable as error:
            raise UserError(f"{printable(image)} cannot be read as an image: {error}.") from None
    try:
        rgb = rgb_image(ImageOps.exif_transpose(image) if isinstance(image, Image.Image) else image)
    except ValueError as error:
        raise UserError(f"an image is given as something {error}.") from None
    return np.asarray(decode.center_square(rgb, size)).transpose(2, 0, 1)


def several(images: Any) -> Sequence[Any] | None:
    """Images one by one, if several are given: a list, an array of paths, or an array or tensor of four dimensions.

    None if one image is given.
    """
    if isinstance(images, (str, os.PathLike, Image.Image)):
        return None
    if isinstance(images, torch.Tensor):
        return images if images.ndim == 4 else None  # type: ignore[return-value]
    if hasattr(images, "to_numpy"):  # a column of pandas or polars
        images = images.to_numpy()
    if isinstance(images, np.ndarray):
        if images.dtype.kind in "OUST":
            return images.ravel().tolist()
        return images if images.ndim == 4 else None  # type: ignore[return-value]
    return list(images)
