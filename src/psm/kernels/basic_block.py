"""A residual block of two 3x3 convolutions as one function; for x86-64 CPUs.

Layer by layer, each layer of a block reads and writes its feature maps in memory. Here a Winograd convolution sums the
statistics of the batch norm after it while its output is in the cache, the next one applies that norm and the ReLU to
what it reads, and gradients go through the norms where the convolutions read them: nothing between the block's two
convolutions is written twice. In a block with stride 2 the 1x1 convolution of the shortcut reads the same input tiles,
and its norm is applied with the block's last. ``benchmarks/convolutions.py`` measures the speed, ``docs/speed.md`` has
the figures.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from psm.kernels import bn_relu, winograd
from psm.kernels.bn_relu import GRAD_BIAS, GRAD_WEIGHT, PARTIALS, BatchNormArgs, image_chunks
from psm.kernels.runtime import channels_last, empty, is_plain_float, launch, simd_width

MAX_CHANNELS = 128  # of blocks with 4x4 output: with more, small_conv is faster layer by layer


def supports(block: Any, x: Tensor) -> bool:
    """True if all layers of the block are plain, their shapes fit, and x is supported by the Winograd convolution."""
    if not simd_width() or x.ndim != 4 or type(block.conv1) is not nn.Conv2d or not _has_plain_shortcut(block):
        return False
    stride, (width, in_channels) = block.conv1.stride[0], block.conv1.weight.shape[:2]
    convs, norms = _layers(block)
    shapes = [(width, in_channels), (width, width), (width, in_channels)]
    if (
        stride != len(convs) - 1  # the shortcut has a convolution where the stride is 2
        or not all(map(is_plain_conv, convs, (3, 3, 1), (stride, 1, stride)))
        or not all(conv.weight.shape[:2] == shape for conv, shape in zip(convs, shapes, strict=False))
        or not all(bn_relu.is_plain_bn(bn) and bn.num_features == width for bn in norms)
        or in_channels % bn_relu.CHANNEL_BLOCK
        or not is_plain_float(x, *(conv.weight for conv in convs))
    ):
        return False
    batch, _, height, length = x.shape
    inner = (batch, width, height // stride, length // stride)
    return (
        (min(inner[2:]) > winograd.TILE or in_channels <= MAX_CHANNELS)
        and winograd.supports_shape(x.shape, block.conv1.weight, stride)
        and winograd.supports_shape(inner, block.conv2.weight, 1)
    )


def _has_plain_shortcut(block: Any) -> bool:
    """True if the shortcut is the identity or a sequence of two layers, without hooks."""
    shortcut = block.downsample
    is_known = type(shortcut) is nn.Identity or (type(shortcut) is nn.Sequential and len(shortcut) == 2)
    return is_known and not bn_relu.has_hooks(shortcut)


def _layers(block: Any) -> tuple[list[Any], list[Any]]:
    """Convolutions and batch norms, those of the shortcut last."""
    layers = [block.conv1, block.bn1, block.conv2, block.bn2, *block.downsample.children()]
    return layers[::2], layers[1::2]


def is_plain_conv(conv: nn.Module, size: int, stride: int) -> bool:
    """True for a plain ``Conv2d`` with this kernel size and stride, padding ``size // 2``, no bias and no hooks."""
    return (
        type(conv) is nn.Conv2d
        and conv.bias is None
        and conv.groups == 1
        and conv.kernel_size == conv.weight.shape[2:] == (size, size)
        and conv.stride == (stride, stride)
        and conv.padding == (size // 2, size // 2)
        and conv.dilation == (1, 1)
        and conv.padding_mode == "zeros"
        and not bn_relu.has_hooks(conv)
    )


def fused_block(block: Any, x: Tensor) -> Tensor:
    """The block's output where ``supports`` holds; updates the running statistics as PyTorch does."""
    convs, norms = _layers(block)
    parameters = [p for conv, bn in zip(convs, norms, strict=True) for p in (conv.weight, bn.weight, bn.bias)]
    return FusedBlock.apply(x, norms, convs[0].stride[0], *parameters)


class FusedBlock(torch.autograd.Function):
    """Of channels-last x (N, C, H, W); parameters are weight, BN weight and BN bias of each convolution in turn."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, norms: list[nn.BatchNorm2d], stride: int, *parameters: Tensor) -> Tensor:
        x = channels_last(x)
        first, second, *shortcut_weights = parameters[::3]
        states = [bn_relu.bn_state(bn) for bn in norms]
        partials = empty(len(x), PARTIALS, len(first))
        tiling, shortcut, beside = winograd.TILINGS[stride], x, {}
        if shortcut_weights:
            shortcut = winograd.empty_output(x, first, tiling)
            shortcut_partials = torch.empty_like(partials)
            beside = {
                "shortcut_weight": shortcut_weights[0], "shortcut": shortcut, "shortcut_partials": shortcut_partials,
            }  # fmt: skip
        inner = winograd.conv_forward(x, first, tiling, partials=partials, **beside)
        bn_relu.finalize_stats(norms[0], inner, states[0], image_chunks(inner, partials))
        if shortcut_weights:
            bn_relu.finalize_stats(norms[2], shortcut, states[2], image_chunks(shortcut, shortcut_partials))
        outer = winograd.conv_forward(inner, second, winograd.TILINGS[1], x_bn=states[0], partials=partials)
        bn_relu.finalize_stats(norms[1], outer, states[1], image_chunks(outer, partials))
        out = torch.empty_like(outer)
        residual = {"residual": shortcut, "residual_bn": states[2] if shortcut_weights else None}
        launch("bn_add_relu", BatchNormArgs, x=outer, bn=states[1], y=out, **residual, **image_chunks(outer, partials))
        ctx.stride = stride
        ctx.save_for_backward(x, inner, outer, out, shortcut if shortcut_weights else None, *parameters[::3], *states)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        x, inner, outer, out, shortcut, *weights_and_states = ctx.saved_tensors
        # Saved-tensor hooks may change the memory format.
        grad_out, x, inner, outer, out = map(channels_last, (grad_out, x, inner, outer, out))
        shortcut = None if shortcut is None else channels_last(shortcut)
        half = len(weights_and_states) // 2
        weights, states = weights_and_states[:half], [state.clone() for state in weights_and_states[half:]]
        partials = empty(len(x), PARTIALS, outer.shape[1])
        grad_relu = torch.empty_like(outer)  # grad_out through the last ReLU
        last = {"x": outer, "bn": states[1], "residual": shortcut, **image_chunks(outer, partials)}
        last["residual_bn"] = None if shortcut is None else states[2]
        launch("bn_grad_partials", BatchNormArgs, y=out, grad_out=grad_out, grad_residual=grad_relu, **last)
        launch("bn_finalize_grad", BatchNormArgs, **last)
        grad_inner = torch.empty_like(inner)
        grad_second, _ = winograd.conv_backward(
            inner, weights[1], winograd.TILINGS[1], True, x_bn=states[0], partials=partials, grad_x=grad_inner,
            out=outer, out_bn=states[1], grad_out=grad_relu,
        )  # fmt: skip
        launch("bn_finalize_grad", BatchNormArgs, x=inner, bn=states[0], **image_chunks(inner, partials))
        beside: dict[str, Any] = {}
        if shortcut is None:
            grad_x, beside["accumulate"] = grad_relu, 1  # the shortcut's gradient, to which the block's is added
        else:
            grad_x = torch.empty_like(x)
            beside = {"shortcut_weight": weights[2], "shortcut": shortcut, "shortcut_bn": states[2]}
            beside["shortcut_grad_out"] = grad_relu
        grad_first, grad_shortcut = winograd.conv_backward(
            x, weights[0], winograd.TILINGS[ctx.stride], True, grad_x=grad_x,
            out=inner, out_bn=states[0], grad_out=grad_inner, **beside,
        )  # fmt: skip
        grad_weights = [grad_first, grad_second, *([] if shortcut is None else [grad_shortcut])]
        grads = [g for w, bn in zip(grad_weights, states, strict=True) for g in (w, bn[GRAD_WEIGHT], bn[GRAD_BIAS])]
        return grad_x, None, None, *grads
