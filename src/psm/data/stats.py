"""Channel statistics of a data set, by which images are normalized."""

from typing import Protocol

import torch
from torch import Tensor

from psm.utils.errors import UserError
from psm.utils.indices import evenly_spaced

CHUNK = 100  # images read at a time
STREAMED_LIMIT = 1_000  # images that are decoded at every start, where they are streamed


class Images(Protocol):
    """What the statistics read: uint8 images (N, 3, H, W) by index."""

    def __len__(self) -> int: ...

    def take(self, indices: Tensor, /) -> Tensor: ...


def channel_statistics(images: Images, limit: int = 10_000) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel, on a scale of 0 to 1, over at most ``limit`` evenly spaced images.

    The standard deviation is at least 1/255, so that images all of one color can be normalized too.
    """
    if len(images) == 0:
        raise UserError("there is no image to take the channel statistics of; give a source with at least one.")
    total, squares, count = torch.zeros(3, dtype=torch.float64), torch.zeros(3, dtype=torch.float64), 0
    sample = getattr(images, "sample", lambda most: evenly_spaced(len(images), most))
    few = min(limit, STREAMED_LIMIT) if getattr(images, "streamed", None) is not None else limit
    for chunk in sample(few).split(CHUNK):
        values = images.take(chunk).to("cpu", torch.float64).div_(255)
        total += values.sum((0, 2, 3))
        squares += values.square().sum((0, 2, 3))
        count += values[:, 0].numel()
    mean = total / count
    std = (squares / count - mean.square()).clamp(min=1 / 255**2).sqrt()
    return tuple(mean.tolist()), tuple(std.tolist())
