"""3x3 convolutions of larger feature maps by Winograd F(4x4, 3x3), and its variant for stride 2; for x86-64 CPUs.

The output is computed in tiles of 4x4 pixels. Input tiles and weights are transformed by the Toom-Cook matrices B and
G, multiplied elementwise (over channels a GEMM per element), and transformed back by A: 36 products instead of 144 per
tile, 81 with stride 2. oneDNN (torch 2.13) runs such convolutions at the speed of GEMM, so only fewer products are
faster; it has this algorithm, but torch does not reach it, and NNPACK's has no gradients.

In PyTorch the transforms take as long as they save, so they are native, a few tiles at a time from input to output so
that these stay in the cache. ``benchmarks/convolutions.py`` measures the speed, ``docs/speed.md`` has the figures.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from psm.kernels.runtime import channels_last, empty, is_plain_float, launch, make_struct, simd_width
from psm.kernels.small_conv import TOOM_COOK, matrix
from psm.kernels.transforms import Matrix, transform_grad_weight, transform_weight

TILE = 4  # pixels along the side of an output tile
TILE_BLOCK = 36  # tiles at a time
PLANE_PADDING = 16  # floats between planes: multiples of a power of two would share cache sets
MIN_TILES = 64  # fewer do not make up for the transform of the weight
MIN_CHANNELS = 32
MAX_GRAD_FLOATS = 2**26  # floats of the transformed grad_weight, which each thread has for itself

WinogradArgs = make_struct(
    "WinogradArgs",
    "x x_bn weight out out_bn grad_out grad_x grad_weight partials "
    "shortcut_weight shortcut shortcut_bn shortcut_grad_out grad_shortcut_weight shortcut_partials workspace",
    "batch height width in_channels out_channels stride accumulate slots images tile_block plane_padding",
)


class Tiling(NamedTuple):
    """The transform of a convolution with this stride; B and A are in ``csrc/winograd.h``."""

    stride: int
    g: Matrix  # G: elements of a transformed line x 3 taps of the weight

    @property
    def step(self) -> int:
        """Input pixels from a tile to the next."""
        return self.stride * TILE

    @property
    def planes(self) -> int:
        """Elements of a transformed tile."""
        return len(self.g) ** 2


TILINGS = {  # by stride
    1: Tiling(1, TOOM_COOK[4, 3, 1, 1].g),
    2: Tiling(2, matrix("0 1 0," * 4 + "1 0 0, 1 0 1, 1 0 -2/3, 1 0 -3/2, 0 0 1")),
}
_ONE_TAP: Matrix = ((1.0,),)  # of a 1x1 convolution, which is only packed


def supports(x: Tensor, weight: Tensor, stride: int) -> bool:
    """True if a 3x3 convolution with this stride and padding 1 is supported and faster."""
    if not simd_width() or stride not in TILINGS or not is_plain_float(x, weight):
        return False
    return supports_shape(x.shape, weight, stride) and min(x.shape[2:]) > TILE  # smaller ones are for small_conv


def supports_shape(shape: tuple[int, ...], weight: Tensor, stride: int) -> bool:
    """True if feature maps of this shape (N, C, H, W) divide into enough tiles."""
    batch, channels, height, width = shape
    tiling = TILINGS[stride]
    return (
        channels == weight.shape[1]
        and height % tiling.step == width % tiling.step == 0
        and batch * height * width >= MIN_TILES * tiling.step**2
        and all(each >= MIN_CHANNELS and each % (2 * (simd_width() or 1)) == 0 for each in weight.shape[:2])
        and _slots(shape, tiling) * tiling.planes * weight.shape[0] * weight.shape[1] <= MAX_GRAD_FLOATS
    )


def winograd_conv(x: Tensor, weight: Tensor, bias: Tensor | None, stride: int) -> Tensor:
    """The convolution of x (N, C, H, W), padding 1, where ``supports`` holds."""
    out = WinogradConv.apply(x, weight, TILINGS[stride])
    return out if bias is None else out + bias[:, None, None]


class WinogradConv(torch.autograd.Function):
    """The convolution of channels-last x (N, C, H, W) with a weight (O, C, 3, 3), padding 1."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, tiling: Tiling) -> Tensor:
        x = channels_last(x)
        ctx.tiling = tiling
        ctx.save_for_backward(x, weight)
        return conv_forward(x, weight, tiling)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        grad_out, x = channels_last(grad_out), channels_last(x)  # saved-tensor hooks may change the memory format
        grad_x = torch.empty_like(x) if ctx.needs_input_grad[0] else None
        needs_weight = ctx.needs_input_grad[1]
        grad_weight, _ = conv_backward(x, weight, ctx.tiling, needs_weight, grad_out=grad_out, grad_x=grad_x)
        return grad_x, grad_weight, None


def conv_forward(
    x: Tensor, weight: Tensor, tiling: Tiling, shortcut_weight: Tensor | None = None, **given: Tensor | None
) -> Tensor:
    """The convolution; further fields of ``WinogradArgs`` are read from or written to the tensors given."""
    out = empty_output(x, weight, tiling)
    if shortcut_weight is not None:
        given["shortcut_weight"] = transform_weight(shortcut_weight.transpose(0, 1), _ONE_TAP, packed=True)
    transformed = transform_weight(weight.transpose(0, 1), tiling.g, packed=True)
    _launch("winograd_forward", tiling, x, weight.shape[0], weight=transformed, out=out, **given)
    return out


def conv_backward(
    x: Tensor,
    weight: Tensor,
    tiling: Tiling,
    needs_weight: bool,
    shortcut_weight: Tensor | None = None,
    **given: Tensor | int | None,
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of the weight, if ``needs_weight``, and of the shortcut's weight, if there is one.

    Further fields of ``WinogradArgs``, ``grad_out`` and ``grad_x`` among them, are read from or written to the tensors
    given.
    """
    slots = _slots(x.shape, tiling)
    out_channels, in_channels = weight.shape[:2]
    grad_transformed = empty(slots, tiling.planes, out_channels, in_channels) if needs_weight else None
    grad_shortcut = None
    if shortcut_weight is not None:
        given["shortcut_weight"] = transform_weight(shortcut_weight, _ONE_TAP, packed=True)
        grad_shortcut = given["grad_shortcut_weight"] = empty(slots, out_channels, in_channels)
    transformed = transform_weight(weight, tiling.g, packed=True)
    given["grad_weight"] = grad_transformed
    _launch("winograd_backward", tiling, x, out_channels, weight=transformed, **given)
    grad_weight = None if grad_transformed is None else transform_grad_weight(grad_transformed, weight, tiling.g)
    if shortcut_weight is None or grad_shortcut is None:
        return grad_weight, None
    return grad_weight, transform_grad_weight(grad_shortcut, shortcut_weight, _ONE_TAP)


def empty_output(x: Tensor, weight: Tensor, tiling: Tiling) -> Tensor:
    """Uninitialized channels-last memory for the output."""
    height, width = (side // tiling.stride for side in x.shape[2:])
    return empty(len(x), height, width, len(weight)).permute(0, 3, 1, 2)


def _images(shape: tuple[int, ...], tiling: Tiling) -> int:
    """Images at a time, so that their tiles fill whole blocks."""
    return TILE_BLOCK // math.gcd(TILE_BLOCK, shape[2] * shape[3] // tiling.step**2)


def _slots(shape: tuple[int, ...], tiling: Tiling) -> int:
    """Threads that have images to work on."""
    return min(torch.get_num_threads(), -(-shape[0] // _images(shape, tiling)))


def _launch(kernel: str, tiling: Tiling, x: Tensor, out_channels: int, **given: Tensor | int | None) -> None:
    batch, in_channels, height, width = x.shape
    slots, shortcut_planes = _slots(x.shape, tiling), TILE**2
    in_floats = tiling.planes * (TILE_BLOCK * in_channels + PLANE_PADDING)
    out_floats = (tiling.planes + shortcut_planes) * (TILE_BLOCK * out_channels + PLANE_PADDING)
    shape = {"batch": batch, "height": height, "width": width, "in_channels": in_channels, "out_channels": out_channels}
    blocks = {"images": _images(x.shape, tiling), "tile_block": TILE_BLOCK, "plane_padding": PLANE_PADDING}
    workspace = empty(slots, in_floats + out_floats)
    launch(
        kernel, WinogradArgs, x=x, workspace=workspace, stride=tiling.stride, slots=slots, **shape, **blocks, **given
    )
