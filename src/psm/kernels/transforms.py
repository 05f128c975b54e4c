"""Transforms of weights and of small feature maps by Toom-Cook matrices, with gradients.

In PyTorch these are copies between memory formats and many small matrix products. The native kernels, for x86-64 CPUs,
read weights where they lie and skip the zeros of the matrices.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor

from psm.kernels.plane_gemm import matmul
from psm.kernels.runtime import empty, is_plain_float, launch, make_struct, simd_width

Matrix = tuple[tuple[float, ...], ...]

MAX_PIXELS = 64  # of a feature map, before and after

WeightArgs = make_struct(
    "WeightArgs",
    "weight transformed g",
    "inner columns taps elements slots packed inner_stride column_stride row_stride tap_stride",
)
PixelArgs = make_struct("PixelArgs", "x matrix out", "images inputs outputs channels")


@cache
def as_tensor(matrix: Matrix, dtype: torch.dtype = torch.float32) -> Tensor:
    with torch.inference_mode(False):
        return torch.tensor(matrix, dtype=dtype, device="cpu")


@cache
def over_both_axes(rows: Matrix, columns: Matrix, dtype: torch.dtype) -> Tensor:
    """The Kronecker product of two matrices."""
    with torch.inference_mode(False):
        return torch.kron(as_tensor(rows, torch.double), as_tensor(columns, torch.double)).to(dtype)


def transform_weight(weight: Tensor, g: Matrix, packed: bool) -> Tensor:
    """G over both axes of a plain weight (inner, columns, taps, taps): (planes, inner, columns), without a gradient.

    ``packed``: as the GEMM of ``winograd`` reads it, a pair of vectors of columns after the other.
    """
    transformed = empty(len(g) ** 2, *weight.shape[:2])
    _launch("transform_weight", weight, transformed, g, packed=packed)
    return transformed


def transform_grad_weight(transformed: Tensor, weight: Tensor, g: Matrix) -> Tensor:
    """The gradient of a weight, in its memory format, from that of its transform (slots, planes, inner, columns).

    The slots are summed.
    """
    grad_weight = torch.empty_like(weight)
    _launch("transform_grad_weight", grad_weight, transformed, g, slots=len(transformed))
    return grad_weight


def _launch(kernel: str, weight: Tensor, transformed: Tensor, g: Matrix, **given: int) -> None:
    (inner, columns, taps, _), strides = weight.shape, weight.stride()
    launch(
        kernel, WeightArgs, weight=weight, transformed=transformed, g=as_tensor(g), inner=inner, columns=columns,
        taps=taps, elements=len(g), inner_stride=strides[0], column_stride=strides[1], row_stride=strides[2],
        tap_stride=strides[3], **{"slots": 1, **given},
    )  # fmt: skip


def _supports(x: Tensor, channels: int, vectors: int = 1) -> bool:
    """True if native kernels run on x, whose channels fill so many vectors at a time."""
    width = simd_width()
    return bool(
        width and channels % (vectors * width) == 0 and not torch.is_autocast_enabled("cpu") and is_plain_float(x)
    )


def weight_planes(weight: Tensor, rows: Matrix, columns: Matrix) -> Tensor:
    """The transform of a weight (O, C, 3, 3) by the matrices G of its rows and columns, (planes, O, C)."""
    if _supports(weight, weight.shape[1], vectors=2) and rows == columns:
        return _WeightPlanes.apply(weight, rows)
    g = over_both_axes(rows, columns, weight.dtype)
    return matmul(g, weight.permute(2, 3, 0, 1).reshape(9, -1)).view(-1, *weight.shape[:2])


class _WeightPlanes(torch.autograd.Function):
    """Gradients of gradients are PyTorch's."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, g: Matrix) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.g = g
        return transform_weight(weight, g, packed=False)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor, None]:
        (weight,) = ctx.saved_tensors
        if torch.is_grad_enabled() or not is_plain_float(grad_out, weight):
            g = over_both_axes(ctx.g, ctx.g, grad_out.dtype)
            grad_weight = (g.t() @ grad_out.flatten(1)).view(*weight.shape[2:], *weight.shape[:2]).permute(2, 3, 0, 1)
            return grad_weight, None
        return transform_grad_weight(grad_out.contiguous()[None], weight, ctx.g), None


def transform_pixels(x: Tensor, rows: Matrix, columns: Matrix) -> Tensor:
    """The pixels of each feature map (N, pixels, C) by the matrix of its rows and columns."""
    matrix = over_both_axes(rows, columns, x.dtype)
    if _supports(x, x.shape[2]) and max(matrix.shape) <= MAX_PIXELS:
        return _Pixels.apply(x, matrix)
    return torch.bmm(matrix.expand(len(x), -1, -1), x)


class _Pixels(torch.autograd.Function):
    """Gradients of gradients are PyTorch's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, matrix: Tensor) -> Tensor:
        ctx.matrix = matrix
        return _product(matrix, x)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor, None]:
        transposed = ctx.matrix.t()
        if torch.is_grad_enabled() or not is_plain_float(grad_out):
            return torch.bmm(transposed.expand(len(grad_out), -1, -1), grad_out), None
        return _product(transposed.contiguous(), grad_out), None


def _product(matrix: Tensor, x: Tensor) -> Tensor:
    x, out = x.contiguous(), empty(len(x), len(matrix), x.shape[2])
    images, inputs, channels = x.shape
    launch(
        "transform_pixels", PixelArgs, x=x, matrix=matrix, out=out, images=images, inputs=inputs, outputs=len(matrix),
        channels=channels,
    )  # fmt: skip
    return out
