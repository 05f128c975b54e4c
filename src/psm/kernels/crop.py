"""Crop, resize, flip and colors of views in one pass, for x86 CPUs.

In torch they are matrix products over a whole image for each of its few visible pixels, and go through memory a dozen
times. Here a place of a view sees only the pixels that count, and a row is cropped, colored, normalized and written at
once; it is compiled (``processor``). ``augment`` has the equations. ``benchmarks/parts.py`` measures it beside torch's
functions: 2.5 times as fast at 32 pixels and 4.3 at 64, 1.4 and 1.5 with a blur, which follows by torch (two cores,
AVX2).
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from psm.kernels.runtime import call, in_memory, lanes, structure

MOST_PIXELS = 2**12  # along a side, so that what a row needs has room on a thread's stack

Pass = structure(
    "Pass",
    "images boxes flip matrix pivot shades views",
    "count all height width size most pixel channel",
)  # struct views


def apply_to(images: Tensor, size: int, *draws: Tensor) -> bool:
    """Whether views of this size of images (B, 3, H, W) can be made in one pass, by such draws."""
    return bool(
        lanes()
        and type(images) is Tensor
        and images.device.type == "cpu"
        and images.layout == torch.strided
        and images.numel()
        and not images._is_zerotensor()
        and max(*images.shape[2:], size) <= MOST_PIXELS
        and in_memory(*draws)
    )


def make(
    views: Tensor,
    images: Tensor,
    box: Sequence[Tensor],
    flip: Tensor,
    colors: tuple[Tensor, Tensor],
    shades: Sequence[Sequence[float]],
) -> None:
    """Write the views (V, B, 3, S, S), with the strides of either memory format, of uint8 images (B, 3, H, W).

    ``box`` are top, left, height and width, in whole pixels, ``colors`` the matrices (3, 3) and pivots of
    ``augment.coloring``, all for each view of each image, (V, B); ``shades`` are the luma's weights and the mean and
    deviation that normalize.
    """
    count, (height, width), size = len(images), images.shape[2:], views.shape[-1]
    images, each = images.contiguous(), views.shape[:2]
    matrix = colors[0].expand(*each, 3, 3).contiguous()
    flipped, pivot = (x.expand(each).to(torch.float32).contiguous() for x in (flip, colors[1]))
    boxes = torch.stack([x.expand(each) for x in box], -1)
    sizes = {"count": count, "all": len(views) * count, "height": height, "width": width, "size": size}
    steps = {"pixel": views.stride(4), "channel": views.stride(2)}
    most = 2 * math.ceil(max(height / size, width / size, 1)) + 3
    call(
        "views", Pass, images=images.data_ptr(), boxes=boxes, flip=flipped, matrix=matrix, pivot=pivot,
        shades=torch.tensor(shades, dtype=torch.float32, device="cpu"), views=views, most=most, **sizes, **steps,
    )  # fmt: skip
