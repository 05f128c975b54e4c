"""Batch norm, the sum with a shortcut and ReLU in one, for x86 CPUs: ``relu(norm(maps) + plus)``.

They are bound by memory: torch reads and writes the maps once for each of the three, and their gradients again. Here
maps are read twice and written once, and so are gradients; what passed the ReLU is known from its result. In torch
alone that takes longer, so it is compiled (``processor``). Moments are summed in pieces, those in double precision.
``benchmarks/convolutions.py`` measures the speed, ``docs/speed.md`` has the figures.
"""

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from psm.kernels.runtime import call, channels_last, in_memory, lanes, room, structure

CHANNELS, SUMS = 32, 3  # at a time; sums that a piece has
FLOATS = 2**13  # of maps at a time: a piece stays in the cache
LEAST = 2**20  # floats of maps; calls weigh more than memory below

Pass = structure(
    "Pass", "x plus gradient y of_x of_plus norm plus_norm sums", "rows columns rows_each", numbers="eps"
)  # struct norm
WEIGHT, BIAS, MEAN, VARIANCE, OF_WEIGHT, OF_BIAS, ROWS = 0, 1, 2, 3, 9, 10, 11  # a norm's numbers by channel


def usual(norm: nn.Module) -> bool:
    """Whether a norm is torch's plain one, learning, over channels that go in vectors, and nobody listens to it."""
    return (
        type(norm) is nn.BatchNorm2d
        and norm.training
        and norm.weight is not None
        and norm.bias is not None
        and norm.track_running_stats
        and norm.running_mean is not None
        and norm.running_var is not None
        and norm.num_batches_tracked is not None
        and norm.momentum is not None
        and norm.num_features % CHANNELS == 0
        and in_memory(norm.weight, norm.bias)
        and not heard(norm)
    )


def heard(module: nn.Module) -> bool:
    """Whether somebody's hooks wait for a module's calls, or its forward is somebody's own."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(hooks) or "forward" in vars(module) or torch.nn.modules.module._has_any_global_hook()


def apply_to(norm: nn.Module, maps: Tensor, plus: Tensor | None) -> bool:
    """Whether the norm and its maps are such that one function is possible, and faster."""
    return bool(
        lanes()
        and usual(norm)
        and in_memory(maps, plus)
        and maps.ndim == 4
        and maps.shape[1] == norm.num_features
        and maps.numel() >= LEAST
        and all(
            x.shape == maps.shape and x.is_contiguous(memory_format=torch.channels_last)
            for x in (maps, maps if plus is None else plus)
        )
    )


def rectified(norm: nn.BatchNorm2d, maps: Tensor, plus: Tensor | None = None) -> Tensor:
    """``relu(norm(maps) + plus)`` for what ``apply_to`` allows; the running moments follow as in torch."""
    return Rectified.apply(maps, plus, norm, norm.weight, norm.bias)


class Rectified(torch.autograd.Function):
    """Of maps (N, C, H, W), channels last."""

    @staticmethod
    def forward(ctx, maps: Tensor, plus: Tensor | None, norm: nn.BatchNorm2d, weight: Tensor, bias: Tensor) -> Tensor:
        result = torch.empty_like(maps)
        over = {"x": maps, "norm": numbers(norm), **_pieces(maps)}
        call("moments", Pass, **over)
        settle(norm, **over)
        call("normalize", Pass, plus=plus, y=result, **over)
        ctx.summed = plus is not None
        ctx.save_for_backward(maps, over["norm"], result if ctx.summed else None)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, Tensor | None, None, Tensor, Tensor]:
        maps, by_channel, result = ctx.saved_tensors
        gradient, maps = channels_last(gradient), channels_last(maps)  # which hooks may have kept in another way
        result = None if result is None else channels_last(result)
        of_maps, of_plus = torch.empty_like(maps), torch.empty_like(maps) if ctx.summed else None
        norm = by_channel.clone()  # the saved one is not to change
        over = {"x": maps, "y": result, "gradient": gradient, "norm": norm, **_pieces(maps)}
        call("sums_of_gradient", Pass, of_plus=of_plus, **over)
        call("settle_gradient", Pass, **over)
        call("gradient_of_x", Pass, of_x=of_maps, **over)
        return of_maps, of_plus, None, norm[OF_WEIGHT], norm[OF_BIAS]


def numbers(norm: nn.BatchNorm2d) -> Tensor:
    """A norm's numbers by channel: weight and bias; room for the others."""
    rows = room(ROWS, norm.num_features)
    rows[WEIGHT], rows[BIAS] = norm.weight, norm.bias
    return rows


def settle(module: nn.BatchNorm2d, x: Tensor, norm: Tensor, sums: Tensor, **over: int) -> None:
    """From the moments of pieces to those of all and the norm's scale; the running moments follow."""
    call("settle", Pass, x=x, norm=norm, sums=sums, eps=module.eps, **over)
    rows = over["rows"]
    module.num_batches_tracked.add_(1)
    module.running_mean.lerp_(norm[MEAN], module.momentum)
    module.running_var.lerp_(norm[VARIANCE] * (rows / (rows - 1)), module.momentum)


def by_map(maps: Tensor, sums: Tensor) -> dict[str, Tensor | int]:
    """Maps as pieces, with their sums (N, 3, C)."""
    count, columns, height, width = maps.shape
    return {"sums": sums, "rows": count * height * width, "columns": columns, "rows_each": height * width}


def _pieces(maps: Tensor) -> dict[str, Tensor | int]:
    columns = maps.shape[1]
    rows, rows_each = maps.numel() // columns, max(1, FLOATS // columns)
    sums = room(-(-rows // rows_each), SUMS, columns)
    return {"sums": sums, "rows": rows, "columns": columns, "rows_each": rows_each}
