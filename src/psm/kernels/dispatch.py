"""The fast forward pass of a network on a CPU, chosen layer by layer.

``optimize`` is a context around forward passes, not a change of the network: module types, state dict and pickles are
what they were. Where nothing faster is supported PyTorch's own layers run. Values and gradients are PyTorch's to
rounding.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from psm import ops
from psm.kernels import basic_block, bn_relu, plane_gemm, runtime, small_conv, winograd

_active: ContextVar[bool] = ContextVar("active", default=False)

# Context in which no ``__torch_function__`` is called, that of ``FastLayers`` among them: it is asked for each
# attribute of a tensor, hundreds of times in a step.
native_code = torch._C.DisableTorchFunction


@contextmanager
def optimize(model: nn.Module) -> Iterator[nn.Module]:
    """Context in which forward passes of the model on a CPU run the fast kernels.

    Convolutions and linear layers of any network are replaced as functions. psm's own residual networks also get a
    ``forward`` that fuses BN, add and ReLU and whole residual blocks, set on the instances and removed when the context
    ends. A network compiled by ``torch.compile`` keeps its ``forward``.
    """
    if not ops.enabled():
        yield model
        return
    runtime.warn_if_not_built()
    modules = _modules(model)
    replaced = [] if _any_compiled(modules) else [m for m in modules if _has_fast_forward(m)]
    for module in replaced:
        module.forward = partial(_forward, module)
    outer = _active.set(True)
    try:
        with FastLayers():
            yield model
    finally:
        _active.reset(outer)
        for module in replaced:
            vars(module).pop("forward", None)


class FastLayers(TorchFunctionMode):
    """Within it ``torch.conv2d`` and ``linear`` are computed by the kernels that are fastest on a CPU."""

    def __torch_function__(
        self, function: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function is torch.conv2d and _may_run():
            return conv2d(*args, **(kwargs or {}))
        if function is functional.linear and _may_run():
            return linear(*args, **(kwargs or {}))
        return function(*args, **(kwargs or {}))


def conv2d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor:
    """``torch.conv2d``, with its parameters' names."""
    if input.ndim == 4 and groups == 1 and dilation in (1, (1, 1), [1, 1]) and not isinstance(padding, str):
        strides, paddings = _pair(stride), _pair(padding)
        if input.dtype in (torch.float32, torch.float64) and not torch.is_autocast_enabled("cpu"):
            rows, columns = (
                small_conv.TOOM_COOK.get((input.shape[2 + i], weight.shape[2 + i], strides[i], paddings[i]))
                for i in (0, 1)
            )
            if rows and columns:
                return small_conv.toom_cook_conv(input, weight, bias, rows, columns)
            is_3x3 = weight.shape[2:] == (3, 3) and strides[0] == strides[1] and paddings == (1, 1)
            if is_3x3 and winograd.supports(input, weight, strides[0]):
                return winograd.winograd_conv(input, weight, bias, strides[0])
        row_windows, column_windows = (
            small_conv.kernel_windows(input.shape[2 + i], weight.shape[2 + i], strides[i], paddings[i]) for i in (0, 1)
        )
        if row_windows and column_windows:
            return small_conv.conv_as_gemm(input, weight, bias, row_windows, column_windows)
        if small_conv.is_small_strided_1x1(input.shape[2:], weight.shape[2:], strides, paddings):
            return small_conv.strided_1x1_as_linear(input, weight, bias, strides)
    return torch.conv2d(input, weight, bias, stride, padding, dilation, groups)


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``torch.nn.functional.linear``, with its parameters' names."""
    return plane_gemm.linear(input, weight, bias)


def bn_add_relu(bn: nn.Module, x: Tensor, residual: Tensor | None = None) -> Tensor:
    """``relu(bn(x) + residual)``, fused where that is supported."""
    with native_code():
        if _may_run() and isinstance(bn, nn.BatchNorm2d) and bn_relu.supports(bn, x, residual):
            return bn_relu.bn_add_relu(bn, x, residual)
    out = bn(x)
    return functional.relu(out if residual is None else out.add_(residual), inplace=True)


def can_fuse_block(block: nn.Module, x: Tensor) -> bool:
    """True if a residual block is supported as one function (``basic_block.fused_block``)."""
    return _may_run() and not torch.is_autocast_enabled("cpu") and basic_block.supports(block, x)


def basic_block_forward(block: Any, x: Tensor) -> Tensor:
    """``psm.models`` ``BasicBlock.forward``."""
    with native_code():
        if can_fuse_block(block, x):
            return basic_block.fused_block(block, x)
    out = bn_add_relu(block.bn1, block.conv1(x))
    return bn_add_relu(block.bn2, block.conv2(out), block.downsample(x))


def bottleneck_forward(block: Any, x: Tensor) -> Tensor:
    """``psm.models`` ``Bottleneck.forward``."""
    out = bn_add_relu(block.bn1, block.conv1(x))
    out = bn_add_relu(block.bn2, block.conv2(out))
    return bn_add_relu(block.bn3, block.conv3(out), block.downsample(x))


def resnet_forward(network: Any, x: Tensor) -> Tensor:
    """``psm.models`` ``ResNet.forward``."""
    x = network.maxpool(bn_add_relu(network.bn1, network.conv1(x)))
    x = network.layer4(network.layer3(network.layer2(network.layer1(x))))
    return x.permute(0, 2, 3, 1).flatten(1, 2).mean(1)  # so that the gradient is channels-last, as x is


FORWARDS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "BasicBlock": basic_block_forward,
    "Bottleneck": bottleneck_forward,
    "ResNet": resnet_forward,
}


def _forward(module: nn.Module, x: Tensor) -> Tensor:
    """The module's fast forward; its own outside of ``optimize``, as for a copy that was made within it."""
    forward = FORWARDS[type(module).__name__] if _may_run() else type(module).forward
    return forward(module, x)


def _has_fast_forward(module: nn.Module) -> bool:
    """True for the residual networks and blocks of psm.models themselves, with their own ``forward``."""
    kind = type(module)
    return kind.__module__.startswith("psm.models.") and kind.__name__ in FORWARDS and "forward" not in vars(module)


def _modules(model: nn.Module) -> list[nn.Module]:
    """The modules of a model. At every step, so without the names and generators of ``nn.Module.modules``."""
    found = {model: None}  # in order
    waiting = [model]
    while waiting:
        for module in waiting.pop()._modules.values():
            if module is not None and module not in found:
                found[module] = None
                waiting.append(module)
    return list(found)


def _any_compiled(modules: list[nn.Module]) -> bool:
    """True if one of them was compiled by ``torch.compile``: another ``forward`` would compile it again."""
    return any(module._compiled_call_impl is not None for module in modules)


def _may_run() -> bool:
    """True within ``optimize`` unless kernels are disabled or a compiler traces the network."""
    return not torch.compiler.is_compiling() and _active.get() and ops.enabled()


def _pair(value: Any) -> tuple[int, int]:
    """One number for both axes, or one for each."""
    down, right = value if isinstance(value, (tuple, list)) and len(value) > 1 else (_single(value),) * 2
    return down, right


def _single(value: Any) -> int:
    return value[0] if isinstance(value, (tuple, list)) else value
