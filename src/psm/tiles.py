"""3x3 convolutions of maps of 8x8 and more by tiles, with a quarter of the products; for x86 CPUs.

A tile is 4x4 places of a map and the places around them. Tiles and kernel are transformed, multiplied place by place,
and the products transformed back (the algorithm of Toom and Cook, known as Winograd's): 36 products of channels for 16
places instead of 144. oneDNN (torch 2.13) convolves such maps at the speed of matrix products, so that only fewer
products are faster; it has this algorithm too, but torch does not reach it, and NNPACK's has no gradients.

In torch alone the transforms take as long as what they save, so it is compiled (``processor``), a few tiles at a time
from maps to result, so that they stay in the cache. Points and error are those of ``small_maps``.
``benchmarks/convolutions.py`` measures the speed, ``docs/speed.md`` has the figures.
"""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from psm.processor import call, lanes
from psm.small_maps import PRODUCTS, transforms

OWN, PLANES = 4, 36  # places along a tile's side that are its own; places that it sees
TOGETHER, BLOCK = 9, 36  # maps, and tiles of them, at a time
GAP = 16  # floats between planes, which keep out of each other's way in the cache: its places repeat with powers of two
LEAST_TILES = 64  # fewer do not make up for the kernel's own transform
LEAST_CHANNELS = 32
MOST = 2**26  # floats that the gradient of the taps may take, which each thread has for itself


def apply_to(input: Tensor, weight: Tensor) -> bool:
    """Whether a 3x3 convolution with stride 1 and padding 1 is one for tiles, and faster by them."""
    if not lanes() or input.dtype != torch.float32 or weight.dtype != torch.float32 or input.device.type != "cpu":
        return False
    maps, _, height, width = input.shape
    return (
        min(height, width) > OWN
        and height % OWN == width % OWN == 0
        and maps * height * width >= LEAST_TILES * OWN**2
        and all(channels >= LEAST_CHANNELS and channels % (2 * lanes()) == 0 for channels in weight.shape[:2])
        and _slots(input) * PLANES * weight.shape[0] * weight.shape[1] <= MOST
        and all(type(x) in (Tensor, torch.nn.Parameter) for x in (input, weight))  # none without numbers
    )


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
        shape = (len(maps), len(weight), *maps.shape[2:])
        result = torch.empty(shape, dtype=maps.dtype, device="cpu", memory_format=torch.channels_last)
        _run("convolve", maps, weight, _taps(weight.transpose(0, 1), kernel), None, result, None)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        maps, weight, kernel = ctx.saved_tensors
        gradient = gradient.contiguous(memory_format=torch.channels_last)
        of_maps = torch.empty_like(maps) if ctx.needs_input_grad[0] else None
        of_taps = (
            torch.empty(_slots(maps), PLANES, *weight.shape[:2], device="cpu") if ctx.needs_input_grad[1] else None
        )
        _run("convolve_back", maps, weight, _taps(weight, kernel), gradient, of_maps, of_taps)
        return of_maps, None if of_taps is None else _weight(of_taps, weight, kernel), None


def _taps(weight: Tensor, kernel: Tensor) -> Tensor:
    """The transformed taps of kernels (inner, columns, 3, 3) as they are read: (36, pairs of vectors, inner, pair)."""
    pairs = weight.permute(2, 3, 0, 1).unflatten(3, (-1, 2 * lanes())).transpose(2, 3)
    return kernel @ pairs.reshape(9, -1)


def _weight(of_taps: Tensor, weight: Tensor, kernel: Tensor) -> Tensor:
    """The gradient of the kernels, in their memory format, from that of the taps (slots, 36, O, C), which add up."""
    total = kernel.T.repeat(1, len(of_taps)) @ of_taps.view(len(of_taps) * PLANES, -1)
    return torch.empty_like(weight).copy_(total.view(3, 3, *weight.shape[:2]).permute(2, 3, 0, 1))


def _slots(maps: Tensor) -> int:
    """Threads that have something to do."""
    return min(torch.get_num_threads(), -(-len(maps) // TOGETHER))


def _run(name: str, maps: Tensor, weight: Tensor, *tensors: Tensor | None) -> None:
    """Call a pass with ``(taps, gradient, to, of taps)``."""
    count, inputs, height, width = maps.shape
    outputs = len(weight)
    slots = _slots(maps)
    room = torch.empty(slots, PLANES, BLOCK * (inputs + outputs) + 2 * GAP, device="cpu")
    addresses = [0 if x is None else x.data_ptr() for x in (maps, *tensors, room)]
    call(name, *addresses, count, height, width, inputs, outputs, slots, TOGETHER, BLOCK, GAP)
