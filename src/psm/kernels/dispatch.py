"""The fastest way through a network's forward pass on a CPU, chosen layer by layer.

It is a mode around the forward pass, not another module: networks, state dicts and exported encoders stay as they are.
Elsewhere than on a CPU, and where nothing faster applies, torch's own functions run. Values and gradients are torch's
to rounding.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from psm.kernels import basic_block as blocks
from psm.kernels import bn_relu as norms
from psm.kernels import winograd as tiles
from psm.kernels.small_conv import PRODUCTS, every_other, few_products, sampled, whole_map, windows

_within = ContextVar("within", default=False)


def faster(device: torch.device) -> AbstractContextManager:
    """The mode for forward passes on a device: faster ways on a CPU, nothing elsewhere."""
    return Faster() if device.type == "cpu" else nullcontext()


class Faster(TorchFunctionMode):
    """Within it, convolutions and batch norms take the way that is fastest on a CPU."""

    def __enter__(self) -> "Faster":
        self._outer = _within.set(True)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        _within.reset(self._outer)
        super().__exit__(*error)

    def __torch_function__(
        self, function: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function is torch.conv2d and not torch.compiler.is_compiling():  # a compiler has its own ways
            return _convolution(*args, **(kwargs or {}))
        return function(*args, **(kwargs or {}))


def in_one(block: nn.Module, maps: Tensor) -> bool:
    """Whether a residual block with these maps is faster as one function, ``blocks.residual``."""
    ready = not torch.compiler.is_compiling() and _within.get() and not torch.is_autocast_enabled("cpu")
    return ready and blocks.apply_to(block, maps)


def rectified(norm: nn.Module, maps: Tensor, plus: Tensor | None = None) -> Tensor:
    """``relu(norm(maps) + plus)``, in one where that is faster."""
    if not torch.compiler.is_compiling() and _within.get() and norms.apply_to(norm, maps, plus):
        return norms.rectified(norm, maps, plus)
    result = norm(maps)
    return functional.relu(result if plus is None else result.add_(plus), inplace=True)


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
        exact = input.dtype in (torch.float32, torch.float64) and not torch.is_autocast_enabled("cpu")
        if exact:
            row_products = PRODUCTS.get((input.shape[2], weight.shape[2], down, top))
            column_products = PRODUCTS.get((input.shape[3], weight.shape[3], right, left))
            if row_products and column_products:
                return few_products(input, weight, bias, row_products, column_products)
            usual = weight.shape[2:] == (3, 3) and down == right and top == left == 1
            if usual and tiles.apply_to(input, weight, down):
                return tiles.by_tiles(input, weight, bias, down)
        rows = windows(input.shape[2], weight.shape[2], down, top)
        columns = windows(input.shape[3], weight.shape[3], right, left)
        if rows and columns:
            return whole_map(input, weight, bias, rows, columns)
        if sampled(input.shape[2:], weight.shape[2:], (down, right), (top, left)):
            return every_other(input, weight, bias, (down, right))
    return torch.conv2d(input, weight, bias, stride, padding, dilation, groups)


def _both(value: Any) -> tuple[int, int]:
    """One number for both axes, or one for each."""
    values = tuple(value) if isinstance(value, (tuple, list)) else (value,)
    return values * 2 if len(values) == 1 else values
