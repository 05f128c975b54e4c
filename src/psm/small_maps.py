"""Convolutions over maps so small that each output sees the whole map, as one matrix product; for CPUs.

Late layers of a residual network work on maps of 2x2 or 1x1 when pictures have 32 pixels. A 3x3 convolution of such a
map is a linear layer: each output place sees all places of the map through a window of the kernel. As one matrix
product it skips the padding (16 instead of 36 products of channels at 2x2), and its gradients run at the speed of a
matrix product, which the convolutions of oneDNN (torch 2.13) do not reach there. ``benchmarks/convolutions.py``
measures it, ``benchmarks/README.md`` has the figures.

It is a mode around the forward pass, not another module: networks, state dicts and exported encoders stay as they are.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


def small_maps(device: torch.device) -> AbstractContextManager:
    """The mode for forward passes on a device: matrix products for small maps on a CPU, nothing elsewhere."""
    return SmallMaps() if device.type == "cpu" else nullcontext()


class SmallMaps(TorchFunctionMode):
    """Within it, ``conv2d`` takes the matrix product where ``windows`` finds that it applies."""

    def __torch_function__(
        self, function: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function is torch.conv2d:
            return _convolution(*args, **(kwargs or {}))
        return function(*args, **(kwargs or {}))


def _convolution(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor:
    """``torch.conv2d``, with its names."""
    if input.ndim == 4 and groups == 1 and dilation in (1, (1, 1), [1, 1]) and not isinstance(padding, str):
        (down, right), (top, left) = _both(stride), _both(padding)
        rows = windows(input.shape[2], weight.shape[2], down, top)
        columns = windows(input.shape[3], weight.shape[3], right, left)
        if rows and columns:
            return product(input, weight, bias, rows, columns)
    return torch.conv2d(input, weight, bias, stride, padding, dilation, groups)


def _both(value: Any) -> tuple[int, int]:
    """One number for both axes, or one for each."""
    values = tuple(value) if isinstance(value, (tuple, list)) else (value,)
    return values * 2 if len(values) == 1 else values


def windows(size: int, kernel: int, stride: int, padding: int) -> list[slice] | None:
    """For each output place along one axis, the part of the kernel that meets the map; None unless all of the map."""
    starts = range(padding, padding - size - 2 * padding + kernel - 1, -stride)
    if not starts or starts[-1] < 0 or padding + size > kernel:
        return None
    return [slice(start, start + size) for start in starts]


def product(input: Tensor, weight: Tensor, bias: Tensor | None, rows: list[slice], columns: list[slice]) -> Tensor:
    """The convolution of maps (N, C, h, w) whose outputs see them through these windows of the kernel."""
    matrix = _Windows.apply(weight, rows, columns)
    offset = None if bias is None else bias.repeat(len(rows) * len(columns))
    flat = torch.nn.functional.linear(input.permute(0, 2, 3, 1).flatten(1), matrix, offset)
    return flat.view(len(input), len(rows), len(columns), weight.shape[0]).permute(0, 3, 1, 2)


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
