"""Matrix products by the full width of AVX-512, with gradients; for x86-64 CPUs.

PyTorch calls MKL, which takes every CPU but Intel's for one with AVX2: on others with AVX-512 it runs at half of their
speed. The native kernel runs there, and reads and writes matrices where they lie; elsewhere, and where shapes do not
fit, PyTorch does. One core of an EPYC with AVX-512, the one CPU it was measured on: 207 to 254 thousand million
operations a second where MKL does 98 to 113, with the products of 3x3 convolutions of small feature maps.
"""

from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import functional

from psm.kernels.runtime import empty, is_plain_float, launch, make_struct, simd_width

WIDTH = 16  # floats in a vector of AVX-512
MIN_PRODUCTS = 2**20  # multiplications; below, the overhead of a launch outweighs the gain

PlaneArgs = make_struct(
    "PlaneArgs", "a b c", "planes rows inner columns a_plane a_row a_inner b_plane b_row b_column c_plane c_row"
)


def plane_products(inputs: Tensor, weights: Tensor) -> Tensor:
    """``inputs[:, p] @ weights[p]`` of all planes p: (N, P, C) by (P, C, O) to (N, P, O)."""
    if supports(inputs, weights):
        return _with_gradients(inputs, weights)
    return _plain(inputs, weights)


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b`` of two matrices."""
    planes = a[:, None], b[None]
    return _with_gradients(*planes)[:, 0] if supports(*planes) else a @ b


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``torch.nn.functional.linear``."""
    if x.ndim > 1 and weight.ndim == 2:
        planes = x.flatten(0, -2)[:, None], weight.t()[None]
        if supports(*planes):
            out = _with_gradients(*planes).view(*x.shape[:-1], len(weight))
            return out if bias is None else out + bias
    return functional.linear(x, weight, bias)


def supports(inputs: Tensor, weights: Tensor) -> bool:
    """True if the native kernel is supported and faster."""
    if simd_width() != WIDTH or mkl_has_avx512() or not is_plain_float(inputs, weights):
        return False
    gets_inner_columns = inputs.requires_grad or _is_transposed(weights)  # in a gradient
    return (
        not torch.is_autocast_enabled("cpu")
        and inputs.shape[1:] == weights.shape[:2]
        and inputs.numel() * weights.shape[2] >= MIN_PRODUCTS
        and weights.shape[2] % (2 * WIDTH) == 0
        and (weights.shape[1] % (2 * WIDTH) == 0 or not gets_inner_columns)
    )


def _is_transposed(weights: Tensor) -> bool:
    """True if rows, not columns, of the matrices lie next to each other."""
    return weights.stride(1) < weights.stride(2)


@cache
def mkl_has_avx512() -> bool:
    """True on Intel's CPUs."""
    try:
        return "GenuineIntel" in Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return True


def _with_gradients(inputs: Tensor, weights: Tensor) -> Tensor:
    if (torch.is_grad_enabled() and (inputs.requires_grad or weights.requires_grad)) or forward_ad._current_level >= 0:
        return PlaneProducts.apply(inputs, weights)
    return _products(inputs, weights)


class PlaneProducts(torch.autograd.Function):
    """The products where ``supports`` holds. Gradients of gradients are PyTorch's."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weights: Tensor) -> Tensor:
        ctx.save_for_backward(inputs, weights)
        return _products(inputs, weights)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, Tensor | None]:
        inputs, weights = ctx.saved_tensors
        products, sums = (_products, _sums) if not torch.is_grad_enabled() and is_plain_float(grad_out) else _PLAIN
        grad_inputs = products(grad_out, weights.transpose(1, 2)) if ctx.needs_input_grad[0] else None
        if not ctx.needs_input_grad[1]:
            return grad_inputs, None
        if _is_transposed(weights):  # and so is the gradient
            return grad_inputs, sums(grad_out, inputs).transpose(1, 2)
        return grad_inputs, sums(inputs, grad_out)


def _products(inputs: Tensor, weights: Tensor) -> Tensor:
    """(N, P, C) by (P, C, O) to (N, P, O)."""
    inputs, out = inputs.contiguous(), empty(len(inputs), len(weights), weights.shape[2])
    _launch(inputs.transpose(0, 1), weights, out.transpose(0, 1))
    return out


def _sums(inputs: Tensor, grad_out: Tensor) -> Tensor:
    """Over images, (N, P, C) and (N, P, O) to (P, C, O)."""
    inputs, grad_out = inputs.contiguous(), grad_out.contiguous()
    out = empty(*inputs.shape[1:], grad_out.shape[2])
    _launch(inputs.permute(1, 2, 0), grad_out.transpose(0, 1), out)
    return out


def _launch(a: Tensor, b: Tensor, c: Tensor) -> None:
    """c = a b for each plane; rows of c are contiguous."""
    planes, rows, inner = a.shape
    (a_plane, a_row, a_inner), (b_plane, b_row, b_column), (c_plane, c_row, _) = a.stride(), b.stride(), c.stride()
    launch(
        "plane_gemm", PlaneArgs, a=a, b=b, c=c, planes=planes, rows=rows, inner=inner, columns=c.shape[2],
        a_plane=a_plane, a_row=a_row, a_inner=a_inner, b_plane=b_plane, b_row=b_row, b_column=b_column,
        c_plane=c_plane, c_row=c_row,
    )  # fmt: skip


def _plain(inputs: Tensor, weights: Tensor) -> Tensor:
    return torch.bmm(inputs.transpose(0, 1), weights).transpose(0, 1)


_PLAIN = (_plain, lambda inputs, grad_out: torch.bmm(inputs.permute(1, 2, 0), grad_out.transpose(0, 1)))
