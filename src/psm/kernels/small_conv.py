"""Convolutions of small feature maps as matrix products, with fewer multiplications; for CPUs.

Late layers of a residual network have feature maps of 4x4, 2x2 or 1x1 pixels when images have 32. oneDNN (torch 2.13)
is slow there, above all in the gradients. Three alternatives, all of them GEMMs:

- ``toom_cook_conv``: 3x3 convolutions of 4x4 and 2x2 feature maps by Winograd's algorithm with Toom-Cook matrices B, G
  and A: 36 products instead of 144 at 4x4, 9 instead of 36 at 2x2.
- ``conv_as_gemm``: where each output pixel sees all input pixels through a window of the weight (1x1 feature maps,
  strides that end there), the convolution is one linear layer, without the products that padding would add.
- ``strided_1x1_as_linear``: a 1x1 convolution with a stride is a linear layer of the pixels that it reads.

Values and gradients are those of the convolution to rounding: the interpolation points (0, +-2/3, +-3/2, infinity) were
chosen for that, with an error of 1.8e-6 of the largest value where torch's is 1.2e-6. ``benchmarks/convolutions.py``
measures the speed, ``docs/speed.md`` has the figures. ``dispatch`` chooses between them and ``torch.conv2d``.
"""

from fractions import Fraction
from typing import Any, NamedTuple

import torch
from torch import Tensor

from psm.kernels.plane_gemm import linear, plane_products
from psm.kernels.transforms import Matrix, transform_pixels, weight_planes


class ToomCook(NamedTuple):
    """Matrices of a convolution along one axis: y = A ((G w) * (B x)), * elementwise."""

    b: Matrix  # products x input pixels
    g: Matrix  # products x taps
    a: Matrix  # output pixels x products


def matrix(text: str) -> Matrix:
    """Rows separated by commas, fractions by spaces."""
    return tuple(tuple(float(Fraction(number)) for number in row.split()) for row in text.split(","))


# (input pixels, kernel size, stride, padding) along one axis; two axes combine by a Kronecker product.
TOOM_COOK = {
    (4, 3, 1, 1): ToomCook(
        matrix(
            "0 -97/72 0 1/2, 243/260 729/520 -27/65 -81/130, -243/260 729/520 27/65 -81/130,"
            "-128/195 -256/585 96/65 64/65, 128/195 -256/585 -96/65 64/65, 1/2 0 -97/72 0"
        ),
        matrix("2 0 0, 1 2/3 4/9, 1 -2/3 4/9, 1/2 3/4 9/8, 1/2 -3/4 9/8, 0 0 2"),
        matrix("1 1 1 1/4 1/4 0, 0 2/3 -2/3 3/8 -3/8 0, 0 4/9 4/9 9/16 9/16 0, 0 8/27 -8/27 27/32 -27/32 1"),
    ),
    (2, 3, 1, 1): ToomCook(matrix("1 1, 0 1, 1 0"), matrix("0 1 0, 0 -1 1, 1 -1 0"), matrix("1 1 0, 1 0 1")),
    (4, 3, 2, 1): ToomCook(
        matrix("1 0 0 0, 0 1 0 0, 0 1 0 0, 0 0 1 0, 0 0 0 1"),
        matrix("0 1 0, 0 0 1, 1 0 0, 0 1 0, 0 0 1"),
        matrix("1 1 0 0 0, 0 0 1 1 1"),
    ),
}


def toom_cook_conv(x: Tensor, weight: Tensor, bias: Tensor | None, rows: ToomCook, columns: ToomCook) -> Tensor:
    """The convolution of x (N, C, h, w) by the Toom-Cook matrices of its rows and columns."""
    inputs = transform_pixels(x.permute(0, 2, 3, 1).flatten(1, 2), rows.b, columns.b)
    weights = weight_planes(weight, rows.g, columns.g)
    out = transform_pixels(plane_products(inputs, weights.transpose(1, 2)), rows.a, columns.a)
    out = out if bias is None else out + bias
    return out.view(len(x), len(rows.a), len(columns.a), len(weight)).permute(0, 3, 1, 2)


def kernel_windows(size: int, kernel: int, stride: int, padding: int) -> list[slice] | None:
    """For each output pixel along one axis, the taps that meet the input; None unless all of them see all of it."""
    starts = range(padding, padding - size - 2 * padding + kernel - 1, -stride)
    if not starts or starts[-1] < 0 or padding + size > kernel:
        return None
    return [slice(start, start + size) for start in starts]


def conv_as_gemm(x: Tensor, weight: Tensor, bias: Tensor | None, rows: list[slice], columns: list[slice]) -> Tensor:
    """The convolution of x (N, C, h, w) whose output pixels see all of it through these windows of the weight."""
    gemm_weight = _WindowMatrix.apply(weight, rows, columns)
    offset = None if bias is None else bias.repeat(len(rows) * len(columns))
    flat = linear(x.permute(0, 2, 3, 1).flatten(1), gemm_weight, offset)
    return flat.view(len(x), len(rows), len(columns), weight.shape[0]).permute(0, 3, 1, 2)


def is_small_strided_1x1(
    size: tuple[int, ...], kernel: tuple[int, ...], stride: tuple[int, int], padding: tuple[int, int]
) -> bool:
    """True for a 1x1 convolution with a stride over at most 4x4 pixels, where ``strided_1x1_as_linear`` is faster."""
    return kernel == (1, 1) and padding == (0, 0) and max(stride) > 1 and max(size) <= 4


def strided_1x1_as_linear(x: Tensor, weight: Tensor, bias: Tensor | None, stride: tuple[int, int]) -> Tensor:
    """The 1x1 convolution of x (N, C, h, w) with a stride."""
    pixels = x[:, :, :: stride[0], :: stride[1]].permute(0, 2, 3, 1)
    return linear(pixels, weight.flatten(1), bias).permute(0, 3, 1, 2)


class _WindowMatrix(torch.autograd.Function):
    """Windows of a weight (O, C, k, k) one below the other, (windows * O, h * w * C).

    The gradient is summed in one tensor, where autograd would fill one of the weight's size for each window.
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor, rows: list[slice], columns: list[slice]) -> Tensor:
        ctx.shape = weight.shape
        is_channels_last = weight.is_contiguous(memory_format=torch.channels_last)
        ctx.memory_format = torch.channels_last if is_channels_last else torch.contiguous_format
        ctx.windows = [(row, column) for row in rows for column in columns]
        taps = weight.permute(0, 2, 3, 1)
        return torch.cat([taps[:, row, column].flatten(1) for row, column in ctx.windows])

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor, None, None]:
        empty = torch.empty(ctx.shape, dtype=grad_out.dtype, device=grad_out.device, memory_format=ctx.memory_format)
        grad_weight = empty.zero_().permute(0, 2, 3, 1)
        for (row, column), part in zip(ctx.windows, grad_out.split(ctx.shape[0]), strict=True):
            window = grad_weight[:, row, column]
            window += part.view_as(window)
        return grad_weight.permute(0, 3, 1, 2), None, None
