"""3x3 convolutions of maps of 8x8 and more by tiles, with a quarter of the products; for x86 CPUs.

A tile is 4x4 places of a map and the places around them. Tiles and kernel are transformed, multiplied place by place,
and the products transformed back (the algorithm of Toom and Cook, known as Winograd's): 36 products of channels for 16
places instead of 144. oneDNN (torch 2.13) convolves such maps at the speed of matrix products, so that only fewer
products are faster; it has this algorithm too, but torch does not reach it, and NNPACK's has no gradients.

Torch does the products. In torch alone the transforms take as long as what they save, so they are compiled
(``processor``). Maps go a few at a time, so that their tiles stay in the cache. Points and error are those of
``small_maps``. ``benchmarks/convolutions.py`` measures the speed, ``docs/speed.md`` has the figures.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from psm.processor import call, lanes
from psm.small_maps import PRODUCTS, transforms

OWN, PLANES = 4, 36  # places along a tile's side that are its own; places that it sees
FLOATS = 2**20  # of transformed maps at a time
LEAST_TILES = 64  # fewer do not make up for the kernel's own transform
LEAST_CHANNELS = 32


def apply_to(input: Tensor, weight: Tensor) -> bool:
    """Whether a 3x3 convolution with stride 1 and padding 1 is one for tiles, and faster by them."""
    if not lanes() or input.dtype != torch.float32 or weight.dtype != torch.float32 or input.device.type != "cpu":
        return False
    maps, _, height, width = input.shape
    sides = min(height, width) > OWN and height % OWN == width % OWN == 0
    enough = min(weight.shape[:2]) >= LEAST_CHANNELS and maps * height * width >= LEAST_TILES * OWN**2
    known = all(type(x) in (Tensor, torch.nn.Parameter) for x in (input, weight))  # not a tensor without numbers
    return sides and enough and known and all(channels % lanes() == 0 for channels in weight.shape[:2])


def by_tiles(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The convolution of maps (N, C, H, W) for what ``apply_to`` allows: the products of 4x4 maps, a tile at a time."""
    one = PRODUCTS[4, 3, 1, 1]
    result = Convolution.apply(input, weight, transforms(one, one, input.dtype)[1])
    return result if bias is None else result + bias[:, None, None]


class Convolution(torch.autograd.Function):
    """The convolution of maps (N, C, H, W) with kernels (O, C, 3, 3), stride 1, padding 1; channels last."""

    @staticmethod
    def forward(ctx, maps: Tensor, weight: Tensor, kernel: Tensor) -> Tensor:
        """``kernel`` (36, 9) transforms a kernel's taps."""
        maps = maps.contiguous(memory_format=torch.channels_last)
        ctx.save_for_backward(maps, weight, kernel)
        taps = _taps(weight, kernel).transpose(1, 2).contiguous()
        shape = (len(maps), len(weight), *maps.shape[2:])
        result = torch.empty(shape, dtype=maps.dtype, device="cpu", memory_format=torch.channels_last)
        for rows, seen, products in _few(maps, weight):
            _transform("maps", maps[rows], seen)
            _transform("out", result[rows], torch.bmm(seen, taps, out=products))
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        maps, weight, kernel = ctx.saved_tensors
        gradient = gradient.contiguous(memory_format=torch.channels_last)
        taps = _taps(weight, kernel)
        of_maps = torch.empty_like(maps) if ctx.needs_input_grad[0] else None
        of_taps = torch.zeros_like(taps) if ctx.needs_input_grad[1] else None
        for rows, seen, products in _few(maps, weight):
            _transform("out_transposed", gradient[rows], products)
            if of_taps is not None:
                _transform("maps", maps[rows], seen)
                of_taps.baddbmm_(products.transpose(1, 2), seen)
            if of_maps is not None:
                _transform("maps_transposed", of_maps[rows], torch.bmm(products, taps, out=seen))
        return of_maps, None if of_taps is None else _weight(of_taps, weight, kernel), None


def _taps(weight: Tensor, kernel: Tensor) -> Tensor:
    """The transformed kernels (36, O, C)."""
    return (kernel @ weight.permute(2, 3, 0, 1).reshape(9, -1)).view(PLANES, *weight.shape[:2])


def _weight(of_taps: Tensor, weight: Tensor, kernel: Tensor) -> Tensor:
    """The gradient of the kernels, in their memory format, from that of the transformed ones."""
    found = (kernel.T @ of_taps.flatten(1)).view(3, 3, *weight.shape[:2]).permute(2, 3, 0, 1)
    return torch.empty_like(weight).copy_(found)


def _few(maps: Tensor, weight: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Rows of the batch that are transformed together, with room for their tiles and for the products.

    The room (36, tiles + 1, channels) ends each plane in a row of zeros, which keeps planes out of each other's way in
    the cache, whose places repeat with powers of two.
    """
    each = maps.shape[2] * maps.shape[3] // OWN**2  # tiles of a map
    count = max(1, FLOATS // (PLANES * each * max(weight.shape[:2])))
    held = 0
    for start in range(0, len(maps), count):
        tiles = min(count, len(maps) - start) * each
        if tiles != held:
            seen, products = (torch.empty(PLANES, tiles + 1, c, device="cpu") for c in reversed(weight.shape[:2]))
            seen[:, -1], products[:, -1], held = 0, 0, tiles
        yield slice(start, start + count), seen, products


def _transform(name: str, maps: Tensor, tiles: Tensor) -> None:
    """Fill the one from the other; channels-last maps (n, C, h, w), tiles (36, rows, C)."""
    source, target = (maps, tiles) if name in ("maps", "out_transposed") else (tiles, maps)
    count, channels, height, width = maps.shape
    call(name, source.data_ptr(), target.data_ptr(), count, height, width, channels, tiles.stride(0))
