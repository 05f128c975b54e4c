"""Convolutions over small maps by fewer products and at the speed of matrix products; for CPUs.

Late layers of a residual network work on maps of 4x4, 2x2 or 1x1 when images have 32 pixels. oneDNN (torch 2.13) is
slow there, above all in the gradients. Ways around it, all of them plain matrix products:

- ``few_products``: 3x3 convolutions of 4x4 and 2x2 maps by the algorithm of Toom and Cook (known as Winograd's): maps
  and kernels are transformed, multiplied place by place, and the products transformed back. A 4x4 map takes 36 products
  of channels instead of 144, a 2x2 map 9 instead of 36.
- ``whole_map``: where each output place sees the whole map through a window of the kernel (all else at 1x1, strides
  that end there), the convolution is one linear layer, without the products that padding would add.
- ``every_other``: a 1x1 convolution with a stride is a linear layer of the places that it sees.

Values and gradients are those of the convolution to rounding: the transforms' points (0, 2/3, 3/2, their negatives,
infinity) were chosen for that, and err by 1.8e-6 of the largest value where torch errs by 1.2e-6.
``benchmarks/convolutions.py`` measures the speed, ``docs/speed.md`` has the figures.

``faster`` chooses between them and ``torch.conv2d``.
"""

from fractions import Fraction
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor


class Products(NamedTuple):
    """A convolution along one axis by few products: y = out ((kernel w) * (maps x)), * place by place."""

    maps: tuple[tuple[float, ...], ...]  # products x map
    kernel: tuple[tuple[float, ...], ...]  # products x 3
    out: tuple[tuple[float, ...], ...]  # outputs x products


def matrix(text: str) -> tuple[tuple[float, ...], ...]:
    """Rows by commas, fractions by spaces."""
    return tuple(tuple(float(Fraction(number)) for number in row.split()) for row in text.split(","))


# (map, kernel, stride, padding) along one axis -> its products. Between two axes they combine.
PRODUCTS = {
    (4, 3, 1, 1): Products(
        matrix(
            "0 -97/72 0 1/2, 243/260 729/520 -27/65 -81/130, -243/260 729/520 27/65 -81/130,"
            "-128/195 -256/585 96/65 64/65, 128/195 -256/585 -96/65 64/65, 1/2 0 -97/72 0"
        ),
        matrix("2 0 0, 1 2/3 4/9, 1 -2/3 4/9, 1/2 3/4 9/8, 1/2 -3/4 9/8, 0 0 2"),
        matrix("1 1 1 1/4 1/4 0, 0 2/3 -2/3 3/8 -3/8 0, 0 4/9 4/9 9/16 9/16 0, 0 8/27 -8/27 27/32 -27/32 1"),
    ),
    (2, 3, 1, 1): Products(matrix("1 1, 0 1, 1 0"), matrix("0 1 0, 0 -1 1, 1 -1 0"), matrix("1 1 0, 1 0 1")),
    (4, 3, 2, 1): Products(
        matrix("1 0 0 0, 0 1 0 0, 0 1 0 0, 0 0 1 0, 0 0 0 1"),
        matrix("0 1 0, 0 0 1, 1 0 0, 0 1 0, 0 0 1"),
        matrix("1 1 0 0 0, 0 0 1 1 1"),
    ),
}


@cache
def transforms(rows: Products, columns: Products, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """The transforms over both axes of maps, kernel and products."""
    with torch.inference_mode(False):
        along = ([torch.tensor(m, dtype=torch.double, device="cpu") for m in axis] for axis in (rows, columns))
        return tuple(torch.kron(a, b).to(dtype) for a, b in zip(*along, strict=True))


def few_products(input: Tensor, weight: Tensor, bias: Tensor | None, rows: Products, columns: Products) -> Tensor:
    """The convolution of maps (N, C, h, w) by the products of both axes."""
    maps, kernel, out = transforms(rows, columns, input.dtype)
    batch, outputs, inputs = len(input), *weight.shape[:2]
    seen = torch.bmm(maps.expand(batch, -1, -1), input.permute(0, 2, 3, 1).flatten(1, 2))
    taps = (kernel @ weight.permute(2, 3, 0, 1).reshape(9, -1)).view(-1, outputs, inputs)
    products = torch.bmm(seen.transpose(0, 1), taps.transpose(1, 2))
    result = torch.bmm(out.expand(batch, -1, -1), products.transpose(0, 1))
    result = result if bias is None else result + bias
    return result.view(batch, len(rows.out), len(columns.out), outputs).permute(0, 3, 1, 2)


def windows(size: int, kernel: int, stride: int, padding: int) -> list[slice] | None:
    """For each output place along one axis, the part of the kernel that meets the map; None unless all of the map."""
    starts = range(padding, padding - size - 2 * padding + kernel - 1, -stride)
    if not starts or starts[-1] < 0 or padding + size > kernel:
        return None
    return [slice(start, start + size) for start in starts]


def whole_map(input: Tensor, weight: Tensor, bias: Tensor | None, rows: list[slice], columns: list[slice]) -> Tensor:
    """The convolution of maps (N, C, h, w) whose outputs see them through these windows of the kernel."""
    matrix = _Windows.apply(weight, rows, columns)
    offset = None if bias is None else bias.repeat(len(rows) * len(columns))
    flat = torch.nn.functional.linear(input.permute(0, 2, 3, 1).flatten(1), matrix, offset)
    return flat.view(len(input), len(rows), len(columns), weight.shape[0]).permute(0, 3, 1, 2)


def sampled(size: tuple[int, ...], kernel: tuple[int, ...], stride: tuple[int, int], padding: tuple[int, int]) -> bool:
    """Whether a convolution over maps of this size sees single places, some of them, and is faster for it."""
    return kernel == (1, 1) and padding == (0, 0) and max(stride) > 1 and max(size) <= 4


def every_other(input: Tensor, weight: Tensor, bias: Tensor | None, stride: tuple[int, int]) -> Tensor:
    """The 1x1 convolution of maps (N, C, h, w) with a stride."""
    seen = input[:, :, :: stride[0], :: stride[1]].permute(0, 2, 3, 1)
    return torch.nn.functional.linear(seen, weight.flatten(1), bias).permute(0, 3, 1, 2)


class _Windows(torch.autograd.Function):
    """Windows of a kernel (O, C, k, k) one below the other, (windows * O, h * w * C).

    The gradient is added up in one tensor, where torch would fill one of the kernel's size for each window.
    """

    @staticmethod
    def forward(ctx, weight: Tensor, rows: list[slice], columns: list[slice]) -> Tensor:
        ctx.shape = weight.shape
        last = weight.is_contiguous(memory_format=torch.channels_last)
        ctx.layout = torch.channels_last if last else torch.contiguous_format
        ctx.windows = [(row, column) for row in rows for column in columns]
        kernel = weight.permute(0, 2, 3, 1)
        return torch.cat([kernel[:, row, column].flatten(1) for row, column in ctx.windows])

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None, None]:
        empty = torch.empty(ctx.shape, dtype=gradient.dtype, device=gradient.device, memory_format=ctx.layout)
        total = empty.zero_().permute(0, 2, 3, 1)
        for (row, column), part in zip(ctx.windows, gradient.split(ctx.shape[0]), strict=True):
            window = total[:, row, column]
            window += part.view_as(window)
        return total.permute(0, 3, 1, 2), None, None
