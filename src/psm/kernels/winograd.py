"""3x3 convolutions of larger maps by tiles, with a quarter of the products, or half with a stride of two; for x86 CPUs.

A tile is 4x4 places of a result and the places of the map that they see. Tiles and kernel are transformed, multiplied
place by place, and the products transformed back (the algorithm of Toom and Cook, known as Winograd's): 36 products of
channels for 16 places instead of 144, and 81 with a stride of two. oneDNN (torch 2.13) convolves such maps at the speed
of matrix products, so that only fewer products are faster; it has this algorithm too, but torch does not reach it, and
NNPACK's has no gradients.

In torch alone the transforms take as long as what they save, so it is compiled (``processor``), a few tiles at a time
from maps to result, so that they stay in the cache. ``benchmarks/convolutions.py`` measures the speed,
``docs/speed.md`` has the figures.
"""

import math
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from psm.kernels.runtime import call, channels_last, in_memory, lanes, room, structure
from psm.kernels.small_conv import PRODUCTS, matrix

OWN = 4  # places along the side of a tile's result
BLOCK = 36  # tiles at a time
GAP = 16  # floats between planes, which keep out of each other's way in the cache: its places repeat with powers of two
LEAST_TILES = 64  # fewer do not make up for the kernel's own transform
LEAST_CHANNELS = 32
MOST_FLOATS = 2**26  # floats that the gradient of the taps may take, which each thread has for itself

Pass = structure(
    "Pass",
    "maps maps_norm taps result result_norm gradient of_maps of_taps sums "
    "shortcut_taps shortcut shortcut_norm shortcut_gradient of_shortcut_taps shortcut_sums room",
    "count height width inputs outputs stride adds slots together block gap",
)  # struct tiles


class Tiling(NamedTuple):
    """How a convolution with a stride goes by tiles; the transforms of maps and products are in ``csrc/tiles.h``."""

    stride: int
    kernel: tuple[tuple[float, ...], ...]  # places that a tile sees along a line x 3 taps

    @property
    def side(self) -> int:
        """Places of a map from a tile to the next."""
        return self.stride * OWN

    @property
    def planes(self) -> int:
        """Places that a tile sees."""
        return len(self.kernel) ** 2


TILINGS = {  # by stride
    1: Tiling(1, PRODUCTS[4, 3, 1, 1].kernel),
    2: Tiling(2, matrix("0 1 0," * 4 + "1 0 0, 1 0 1, 1 0 -2/3, 1 0 -3/2, 0 0 1")),
}


def apply_to(input: Tensor, weight: Tensor, stride: int) -> bool:
    """Whether a 3x3 convolution with this stride and padding 1 is one for tiles, and faster by them."""
    if not lanes() or stride not in TILINGS or not in_memory(input, weight):
        return False
    return fits(input.shape, weight, stride) and min(input.shape[2:]) > OWN  # those are small_maps'


def fits(shape: tuple[int, ...], weight: Tensor, stride: int) -> bool:
    """Whether maps of this shape (N, C, H, W) go in tiles, and are enough for them."""
    maps, channels, height, width = shape
    tiling = TILINGS[stride]
    return (
        channels == weight.shape[1]
        and height % tiling.side == width % tiling.side == 0
        and maps * height * width >= LEAST_TILES * tiling.side**2
        and all(each >= LEAST_CHANNELS and each % (2 * lanes()) == 0 for each in weight.shape[:2])
        and _slots(shape, tiling) * tiling.planes * weight.shape[0] * weight.shape[1] <= MOST_FLOATS
    )


def by_tiles(input: Tensor, weight: Tensor, bias: Tensor | None, stride: int) -> Tensor:
    """The convolution of maps (N, C, H, W), padding 1, for what ``apply_to`` allows."""
    result = Convolution.apply(input, weight, TILINGS[stride])
    return result if bias is None else result + bias[:, None, None]


class Convolution(torch.autograd.Function):
    """The convolution of maps (N, C, H, W) with kernels (O, C, 3, 3), padding 1; channels last."""

    @staticmethod
    def forward(ctx, maps: Tensor, weight: Tensor, tiling: Tiling) -> Tensor:
        maps = channels_last(maps)
        ctx.tiling = tiling
        ctx.save_for_backward(maps, weight)
        return convolve(maps, weight, tiling)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        maps, weight = ctx.saved_tensors
        gradient, maps = channels_last(gradient), channels_last(maps)  # which hooks may have kept in another way
        of_maps = torch.empty_like(maps) if ctx.needs_input_grad[0] else None
        learned = ctx.needs_input_grad[1]
        of_weight, _ = convolve_back(maps, weight, ctx.tiling, learned, gradient=gradient, of_maps=of_maps)
        return of_maps, of_weight, None


def convolve(
    maps: Tensor, weight: Tensor, tiling: Tiling, shortcut_weight: Tensor | None = None, **more: Tensor | None
) -> Tensor:
    """The convolution, and what else ``Pass`` names, into tensors given for it."""
    result = empty_result(maps, weight, tiling)
    if shortcut_weight is not None:
        more["shortcut_taps"] = _pairs(shortcut_weight.transpose(0, 1))
    taps = _taps(weight.transpose(0, 1), tiling)
    _run("convolve", tiling, maps, weight, taps=taps, result=result, **more)
    return result


def convolve_back(
    maps: Tensor,
    weight: Tensor,
    tiling: Tiling,
    learned: bool,
    shortcut_weight: Tensor | None = None,
    **more: Tensor | int | None,
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of the kernels, of the convolution and of its shortcut, if they are wanted, and what else ``Pass``
    names, into tensors given for it."""
    slots = _slots(maps.shape, tiling)
    outputs, inputs = weight.shape[:2]
    if learned:
        more["of_taps"] = room(slots, tiling.planes, outputs, inputs)
    if shortcut_weight is not None:
        more["shortcut_taps"] = _pairs(shortcut_weight)
        more["of_shortcut_taps"] = room(slots, outputs, inputs)
    _run("convolve_back", tiling, maps, weight, taps=_taps(weight, tiling), **more)
    of_weight = _weight(more["of_taps"], weight, tiling) if learned else None
    if shortcut_weight is None:
        return of_weight, None
    return of_weight, torch.empty_like(shortcut_weight).copy_(more["of_shortcut_taps"].sum(0)[..., None, None])


def empty_result(maps: Tensor, weight: Tensor, tiling: Tiling) -> Tensor:
    """Room for a result, channels last."""
    height, width = (side // tiling.stride for side in maps.shape[2:])
    return room(len(maps), height, width, len(weight)).permute(0, 3, 1, 2)


@cache
def _kernel(tiling: Tiling) -> Tensor:
    """The transform of a kernel's taps over both axes, (planes, 9)."""
    with torch.inference_mode(False):
        line = torch.tensor(tiling.kernel, dtype=torch.double, device="cpu")
        return torch.kron(line, line).float()


def _pairs(weight: Tensor) -> Tensor:
    """Kernels (inner, columns, h, w) as they are read: a row for each tap, (pairs of vectors, inner, pair) each."""
    pairs = weight.permute(2, 3, 0, 1).unflatten(3, (-1, 2 * lanes())).transpose(2, 3)
    return pairs.reshape(weight.shape[2] * weight.shape[3], -1).contiguous()


def _taps(weight: Tensor, tiling: Tiling) -> Tensor:
    """The transformed taps of kernels (inner, columns, 3, 3), a row for each plane."""
    with torch.autocast("cpu", enabled=False):  # where somebody takes gradients
        return _kernel(tiling) @ _pairs(weight)


def _weight(of_taps: Tensor, weight: Tensor, tiling: Tiling) -> Tensor:
    """The gradient of the kernels, in their memory format, from that of the taps (slots, planes, O, C)."""
    with torch.autocast("cpu", enabled=False):
        total = _kernel(tiling).T.repeat(1, len(of_taps)) @ of_taps.flatten(0, 1).flatten(1)
    return torch.empty_like(weight).copy_(total.view(3, 3, *weight.shape[:2]).permute(2, 3, 0, 1))


def _together(shape: tuple[int, ...], tiling: Tiling) -> int:
    """Maps at a time, so that their tiles make whole blocks."""
    return BLOCK // math.gcd(BLOCK, shape[2] * shape[3] // tiling.side**2)


def _slots(shape: tuple[int, ...], tiling: Tiling) -> int:
    """Threads that have something to do."""
    return min(torch.get_num_threads(), -(-shape[0] // _together(shape, tiling)))


def _run(name: str, tiling: Tiling, maps: Tensor, weight: Tensor, **more: Tensor | int | None) -> None:
    count, inputs, height, width = maps.shape
    outputs, slots = len(weight), _slots(maps.shape, tiling)
    shortcut = OWN**2  # planes
    seen, products = tiling.planes * (BLOCK * inputs + GAP), (tiling.planes + shortcut) * (BLOCK * outputs + GAP)
    sizes = {"count": count, "height": height, "width": width, "inputs": inputs, "outputs": outputs}
    blocks = {"slots": slots, "together": _together(maps.shape, tiling), "block": BLOCK, "gap": GAP}
    call(name, Pass, maps=maps, room=room(slots, seen + products), stride=tiling.stride, **sizes, **blocks, **more)
