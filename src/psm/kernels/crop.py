"""Crop, resize, flip, color and normalization of views in one pass; for x86-64 CPUs.

In PyTorch these are matrix products over a whole image for the few source pixels of each output pixel, and a dozen
passes over memory. Here an output pixel reads only its source pixels, and a row is cropped, colored, normalized and
written at once. ``psm.ops.crop_color`` has the equations. ``benchmarks/parts.py`` measures it beside PyTorch: 2.5 times
as fast at 32 pixels and 4.3 at 64, 1.4 and 1.5 with a blur, which follows in PyTorch (two cores, AVX2).
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from psm.kernels.runtime import is_plain_float, launch, make_struct, simd_width

MAX_SIDE = 2**12  # pixels: the working memory of a row is on a thread's stack

CropArgs = make_struct(
    "CropArgs",
    "images boxes flip color pivot constants views",
    "num_images num_views height width size max_taps pixel_stride channel_stride",
)


def supports(
    images: Tensor,
    boxes: Sequence[Tensor],
    flip: Tensor,
    color: Tensor,
    pivot: Tensor,
    luma: Tensor,
    mean: Tensor | None,
    std: Tensor | None,
    out: Tensor,
) -> bool:
    """True for non-empty CPU images of at most ``MAX_SIDE`` pixels, float32 parameters and packed views."""
    return bool(
        simd_width()
        and type(images) is Tensor
        and images.device.type == "cpu"
        and images.layout == torch.strided
        and images.numel()
        and not images._is_zerotensor()
        and max(*images.shape[2:], out.shape[-1]) <= MAX_SIDE
        and is_plain_float(*boxes, color, pivot, luma, mean, std, out)
        and _is_packed(out)
    )


def _is_packed(views: Tensor) -> bool:
    """True if views (V, B, 3, S, S), flattened to (V * B, 3, S, S), are contiguous or channels-last."""
    (count, images, channels, size, _), strides = views.shape, views.stride()
    view_size = channels * size * size
    outer = (strides[0] == images * view_size or count == 1) and strides[1] == view_size
    return outer and strides[2:] in ((size * size, size, 1), (1, channels * size, channels))


def crop_color(
    images: Tensor,
    boxes: Sequence[Tensor],
    flip: Tensor,
    color: Tensor,
    pivot: Tensor,
    luma: Tensor,
    mean: Tensor | None,
    std: Tensor | None,
    out: Tensor,
) -> None:
    """``psm.ops.crop_color``."""
    count, (height, width), size = len(images), images.shape[2:], out.shape[-1]
    images, shape = images.contiguous(), out.shape[:2]
    color = color.expand(*shape, 3, 3).contiguous()
    flips, pivots = (x.expand(shape).to(torch.float32).contiguous() for x in (flip, pivot))
    box = torch.stack([x.expand(shape) for x in boxes], -1)
    mean = torch.zeros_like(luma) if mean is None else mean
    std = torch.ones_like(luma) if std is None else std
    sizes = {"num_images": count, "num_views": len(out) * count, "height": height, "width": width, "size": size}
    strides = {"pixel_stride": out.stride(4), "channel_stride": out.stride(2)}
    max_taps = 2 * math.ceil(max(height / size, width / size, 1)) + 3
    launch(
        "crop_color", CropArgs, images=images.data_ptr(), boxes=box, flip=flips, color=color, pivot=pivots,
        constants=torch.stack([luma, mean, std]), views=out, max_taps=max_taps, **sizes, **strides,
    )  # fmt: skip
