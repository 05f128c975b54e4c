"""Images of any kind as inputs of a trained encoder."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from psm.config.schema import ViewsConfig
from psm.data.any_image import several, square_pixels
from psm.data.decode import quiet_pillow
from psm.models.pretrained import EncoderInfo
from psm.views.transform import Views


def preprocess(images: Any, info: EncoderInfo) -> Tensor:
    """Normalized inputs, float32 (3, S, S) of an image or (B, 3, S, S) of several; see ``Encoder.preprocess``."""
    batch = several(images)
    with quiet_pillow():
        squares = [square_pixels(image, info.size) for image in ([images] if batch is None else batch)]
    pixels = np.stack(squares) if squares else np.empty((0, 3, info.size, info.size), dtype=np.uint8)
    inputs = Views(ViewsConfig(size=info.size), info.size, info.mean, info.std).plain(torch.from_numpy(pixels))
    return inputs[0] if batch is None else inputs
