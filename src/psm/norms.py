"""Batch norm, the sum with a shortcut and ReLU in one, for x86 CPUs: ``relu(norm(maps) + plus)``.

They are bound by memory: torch reads and writes the maps once for each of the three, and their gradients again. Here
maps are read twice and written once, and so are gradients; what passed the ReLU is known from its result. In torch
alone that takes longer, so it is compiled (``processor``). Moments are summed in pieces, those in double precision.
``benchmarks/convolutions.py`` measures the speed, ``docs/speed.md`` has the figures.
"""

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from psm.processor import call, lanes

CHANNELS = 32  # at a time
FLOATS = 2**13  # of maps at a time: a piece stays in the cache
LEAST = 2**20  # floats of maps; calls weigh more than memory below


def apply_to(norm: nn.Module, maps: Tensor, plus: Tensor | None) -> bool:
    """Whether a norm is torch's plain one, learning, over maps for which one function is faster."""
    given = [maps] if plus is None else [maps, plus]
    return bool(
        lanes()
        and type(norm) is nn.BatchNorm2d
        and norm.training
        and norm.affine
        and norm.track_running_stats
        and norm.momentum is not None
        and norm.weight.dtype == torch.float32
        and maps.numel() >= LEAST
        and maps.shape[1] % CHANNELS == 0
        and all(type(x) is Tensor and x.dtype == torch.float32 and x.device.type == "cpu" for x in given)
        and all(x.shape == maps.shape and x.is_contiguous(memory_format=torch.channels_last) for x in given)
    )


def rectified(norm: nn.BatchNorm2d, maps: Tensor, plus: Tensor | None = None) -> Tensor:
    """``relu(norm(maps) + plus)`` for what ``apply_to`` allows; the running moments follow as in torch."""
    result, mean, variance = Rectified.apply(maps, plus, norm.weight, norm.bias, norm.eps)
    with torch.no_grad():
        rows = maps.numel() // maps.shape[1]
        norm.num_batches_tracked.add_(1)
        norm.running_mean.lerp_(mean, norm.momentum)
        norm.running_var.lerp_(variance * (rows / (rows - 1)), norm.momentum)
    return result


class Rectified(torch.autograd.Function):
    """Of maps (N, C, H, W), channels last: the result, and the batch's mean and variance."""

    @staticmethod
    def forward(
        ctx, maps: Tensor, plus: Tensor | None, weight: Tensor, bias: Tensor, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        result = torch.empty_like(maps)
        by_channel = torch.empty(8, len(weight), device="cpu")  # weight, bias, mean, variance, scale, offset, room
        by_channel[0], by_channel[1] = weight, bias
        _pass("norm_forward", maps, plus, result, None, None, None, by_channel, eps)
        ctx.eps, ctx.summed = eps, plus is not None
        ctx.save_for_backward(maps, by_channel, result if ctx.summed else None)
        mean, variance = by_channel[2].clone(), by_channel[3].clone()
        ctx.mark_non_differentiable(mean, variance)
        return result, mean, variance

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor, *_: Tensor) -> tuple[Tensor, Tensor | None, Tensor, Tensor, None]:
        maps, by_channel, result = ctx.saved_tensors
        gradient = gradient.contiguous(memory_format=torch.channels_last)
        of_maps, of_plus = torch.empty_like(maps), torch.empty_like(maps) if ctx.summed else None
        by_channel = by_channel.clone()  # the saved one is not to change
        _pass("norm_backward", maps, None, result, gradient, of_maps, of_plus, by_channel, ctx.eps)
        of_bias, of_weight = by_channel[6:]
        return of_maps, of_plus, of_weight, of_bias, None


def _pass(name: str, maps: Tensor, *others: Tensor | float | None) -> None:
    """With ``(plus, result, gradient, of maps, of plus, by channel, eps)``."""
    *tensors, by_channel, eps = others
    columns = maps.shape[1]
    rows, rows_each = maps.numel() // columns, max(1, FLOATS // columns)
    sums = torch.empty(-(-rows // rows_each), 2, columns, device="cpu")
    addresses = [0 if x is None else x.data_ptr() for x in (maps, *tensors, sums, by_channel)]
    call(name, *addresses, rows, columns, rows_each, eps)
