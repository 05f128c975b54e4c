"""A residual block of two 3x3 convolutions in one, for x86 CPUs.

One after the other, each of a block's layers sends its maps through memory. Here a convolution by tiles (``tiles``)
sums the moments that its norm takes while its maps are in the cache, the next one normalizes and rectifies what it
reads, and gradients are taken through the norms where the convolutions read them: what is between the block's two
convolutions is never written. Where a block halves the sides, the 1x1 convolution of its shortcut uses the places that
the tiles have, and its norm goes with the block's last. ``benchmarks/convolutions.py`` measures the speed,
``docs/speed.md`` has the figures.
"""

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from psm.kernels import bn_relu as norms
from psm.kernels import winograd as tiles
from psm.kernels.bn_relu import OF_BIAS, OF_WEIGHT, SUMS, by_map, numbers
from psm.kernels.runtime import call, channels_last, in_memory, lanes, room

MOST_CHANNELS = 128  # of maps that lead to 4x4: from there on those are faster by themselves (``small_maps``)


def apply_to(block: nn.Module, maps: Tensor) -> bool:
    """Whether a block's layers are such, and its maps, that it can go in one."""
    if not lanes() or maps.ndim != 4 or type(block.conv1) is not nn.Conv2d or not _passes_by(block):
        return False
    stride, (width, inputs) = block.conv1.stride[0], block.conv1.weight.shape[:2]
    convolutions, modules = _layers(block)
    shapes = [(width, inputs), (width, width), (width, inputs)]
    if (
        stride != len(convolutions) - 1  # a shortcut has a convolution where sides are halved
        or not all(map(_usual, convolutions, (3, 3, 1), (stride, 1, stride)))
        or not all(layer.weight.shape[:2] == shape for layer, shape in zip(convolutions, shapes, strict=False))
        or not all(norms.usual(norm) and norm.num_features == width for norm in modules)
        or inputs % norms.CHANNELS
        or not in_memory(maps, *(layer.weight for layer in convolutions))
    ):
        return False
    count, _, height, length = maps.shape
    inner = (count, width, height // stride, length // stride)
    return (
        (min(inner[2:]) > tiles.OWN or inputs <= MOST_CHANNELS)
        and tiles.fits(maps.shape, block.conv1.weight, stride)
        and tiles.fits(inner, block.conv2.weight, 1)
    )


def _passes_by(block: nn.Module) -> bool:
    """Whether the shortcut is one that can be told: nothing, or a convolution and a norm."""
    way = block.downsample
    return not norms.heard(way) and (type(way) is nn.Identity or (type(way) is nn.Sequential and len(way) == 2))


def _layers(block: nn.Module) -> tuple[list[nn.Module], list[nn.Module]]:
    """Convolutions and norms, those of a shortcut last."""
    layers = [block.conv1, block.bn1, block.conv2, block.bn2, *block.downsample.children()]
    return layers[::2], layers[1::2]


def _usual(layer: nn.Module, size: int, stride: int) -> bool:
    """Whether a layer is a plain convolution with this kernel and stride, sides kept before the stride."""
    return (
        type(layer) is nn.Conv2d
        and layer.bias is None
        and layer.groups == 1
        and layer.kernel_size == layer.weight.shape[2:] == (size, size)
        and layer.stride == (stride, stride)
        and layer.padding == (size // 2, size // 2)
        and layer.dilation == (1, 1)
        and layer.padding_mode == "zeros"
        and not norms.heard(layer)
    )


def residual(block: nn.Module, maps: Tensor) -> Tensor:
    """The block's result for what ``apply_to`` allows; the norms' running moments follow as in torch."""
    convolutions, modules = _layers(block)
    parameters = [x for c, n in zip(convolutions, modules, strict=True) for x in (c.weight, n.weight, n.bias)]
    return Residual.apply(maps, modules, block.conv1.stride[0], *parameters)


class Residual(torch.autograd.Function):
    """Of maps (N, C, H, W), channels last; parameters are those of convolution and norm in turn."""

    @staticmethod
    def forward(ctx, maps: Tensor, modules: list[nn.BatchNorm2d], stride: int, *parameters: Tensor) -> Tensor:
        maps = channels_last(maps)
        first, second, *beside = parameters[::3]  # weights of convolutions
        rows = [numbers(module) for module in modules]
        sums = room(len(maps), SUMS, len(first))
        shortcut, more = maps, {}
        if beside:
            shortcut = tiles.empty_result(maps, first, tiles.TILINGS[stride])
            more = {"shortcut_weight": beside[0], "shortcut": shortcut, "shortcut_sums": torch.empty_like(sums)}
        inner = tiles.convolve(maps, first, tiles.TILINGS[stride], sums=sums, **more)
        norms.settle(modules[0], inner, rows[0], **by_map(inner, sums))
        if beside:
            norms.settle(modules[2], shortcut, rows[2], **by_map(shortcut, more["shortcut_sums"]))
        outer = tiles.convolve(inner, second, tiles.TILINGS[1], maps_norm=rows[0], sums=sums)
        norms.settle(modules[1], outer, rows[1], **by_map(outer, sums))
        result = torch.empty_like(outer)
        plus = {"plus": shortcut, "plus_norm": rows[2] if beside else None}
        call("normalize", norms.Pass, x=outer, norm=rows[1], y=result, **plus, **by_map(outer, sums))
        ctx.stride = stride
        ctx.save_for_backward(maps, inner, outer, result, shortcut if beside else None, *parameters[::3], *rows)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor) -> tuple[Tensor | None, ...]:
        maps, inner, outer, result, shortcut, *weights_and_rows = ctx.saved_tensors
        # Hooks of saved tensors may have kept them in another way.
        gradient, maps, inner, outer, result = map(channels_last, (gradient, maps, inner, outer, result))
        shortcut = None if shortcut is None else channels_last(shortcut)
        weights, rows = weights_and_rows[: len(weights_and_rows) // 2], weights_and_rows[len(weights_and_rows) // 2 :]
        rows = [row.clone() for row in rows]  # the saved ones are not to change
        sums = room(len(maps), SUMS, outer.shape[1])
        passed = torch.empty_like(outer)  # the gradient that passes the last ReLU
        last = {"x": outer, "norm": rows[1], "plus": shortcut, "plus_norm": None if shortcut is None else rows[2]}
        call("sums_of_gradient", norms.Pass, y=result, gradient=gradient, of_plus=passed, **last, **by_map(outer, sums))
        call("settle_gradient", norms.Pass, **last, **by_map(outer, sums))
        of_inner = torch.empty_like(inner)
        of_second, _ = tiles.convolve_back(
            inner, weights[1], tiles.TILINGS[1], True, maps_norm=rows[0], sums=sums, of_maps=of_inner,
            result=outer, result_norm=rows[1], gradient=passed,
        )  # fmt: skip
        call("settle_gradient", norms.Pass, x=inner, norm=rows[0], **by_map(inner, sums))
        if shortcut is None:
            of_maps, more = passed, {"adds": 1}  # the gradient of the shortcut, to which the block's is added
        else:
            of_maps = torch.empty_like(maps)
            more = {"shortcut_weight": weights[2], "shortcut": shortcut, "shortcut_norm": rows[2]}
            more["shortcut_gradient"] = passed
        of_first, of_shortcut = tiles.convolve_back(
            maps, weights[0], tiles.TILINGS[ctx.stride], True, of_maps=of_maps,
            result=inner, result_norm=rows[0], gradient=of_inner, **more,
        )  # fmt: skip
        of_weights = [of_first, of_second, *([] if shortcut is None else [of_shortcut])]
        gradients = [x for w, row in zip(of_weights, rows, strict=True) for x in (w, row[OF_WEIGHT], row[OF_BIAS])]
        return of_maps, None, None, *gradients
