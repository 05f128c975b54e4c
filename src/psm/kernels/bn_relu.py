"""Fused BN + add + ReLU, ``relu(bn(x) + residual)``; for x86-64 CPUs.

These layers are bound by memory: PyTorch reads and writes the feature maps once for each of the three, and their
gradients again. Here feature maps are read twice and written once, and so are gradients; the mask of the ReLU is
recovered from its result. Statistics are summed per chunk, and the chunks in double precision.
``benchmarks/convolutions.py`` measures the speed, ``docs/speed.md`` has the figures.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from psm.kernels.runtime import channels_last, empty, is_plain_float, launch, make_struct, simd_width

CHANNEL_BLOCK, PARTIALS = 32, 3  # channels at a time; sums that a chunk of rows has
CHUNK_FLOATS = 2**13  # of feature maps at a time: a chunk stays in the cache
MIN_FLOATS = 2**20  # of feature maps; below, the overhead of launches outweighs the gain

BatchNormArgs = make_struct(
    "BatchNormArgs",
    "x residual grad_out y grad_x grad_residual bn residual_bn partials running_mean running_var",
    "rows channels chunk_rows",
    numbers="eps momentum",
)
# Rows of a batch norm's state (BN_ROWS, channels); the others are intermediate values (csrc/simd.h).
WEIGHT, BIAS, MEAN, VARIANCE, GRAD_WEIGHT, GRAD_BIAS, BN_ROWS = 0, 1, 2, 3, 9, 10, 11

# Hooks of all modules, in torch.nn.modules.module; torch has a function that asks for them only since 2.7.
GLOBAL_HOOKS = [f"_global_{when}_hooks" for when in ("forward_pre", "forward", "backward_pre", "backward")]


def is_plain_bn(bn: nn.Module) -> bool:
    """True for a plain ``BatchNorm2d`` in training mode with ``num_features % 32 == 0`` and no hooks."""
    return (
        type(bn) is nn.BatchNorm2d
        and bn.training
        and bn.weight is not None
        and bn.bias is not None
        and bn.track_running_stats
        and bn.running_mean is not None
        and bn.running_var is not None
        and bn.num_batches_tracked is not None
        and bn.momentum is not None
        and bn.num_features % CHANNEL_BLOCK == 0
        and is_plain_float(bn.weight, bn.bias, bn.running_mean, bn.running_var)
        and bn.running_mean.is_contiguous()
        and bn.running_var.is_contiguous()
        and not has_hooks(bn)
    )


def has_hooks(module: nn.Module) -> bool:
    """True if the module has hooks, its ``forward`` was replaced, or there are global module hooks."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(hooks) or "forward" in vars(module) or any(vars(torch.nn.modules.module)[name] for name in GLOBAL_HOOKS)


def supports(bn: nn.Module, x: Tensor, residual: Tensor | None) -> bool:
    """True for a plain batch norm and large channels-last float32 feature maps."""
    return bool(
        simd_width()
        and is_plain_bn(bn)
        and is_plain_float(x, residual)
        and x.ndim == 4
        and x.shape[1] == bn.num_features
        and x.numel() >= MIN_FLOATS
        and all(
            each.shape == x.shape and each.is_contiguous(memory_format=torch.channels_last)
            for each in (x, x if residual is None else residual)
        )
    )


def bn_add_relu(bn: nn.BatchNorm2d, x: Tensor, residual: Tensor | None = None) -> Tensor:
    """``relu(bn(x) + residual)`` where ``supports`` holds; updates the running statistics as PyTorch does."""
    return BatchNormAddReLU.apply(x, residual, bn, bn.weight, bn.bias)


class BatchNormAddReLU(torch.autograd.Function):
    """Of channels-last feature maps (N, C, H, W)."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor | None, module: nn.BatchNorm2d, weight: Tensor, bias: Tensor
    ) -> Tensor:
        out = torch.empty_like(x)
        bn, chunks = bn_state(module), _chunks(x)
        launch("bn_partial_stats", BatchNormArgs, x=x, bn=bn, **chunks)
        finalize_stats(module, x, bn, chunks)
        launch("bn_add_relu", BatchNormArgs, x=x, bn=bn, residual=residual, y=out, **chunks)
        ctx.has_residual = residual is not None
        ctx.save_for_backward(x, bn, out if ctx.has_residual else None)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor, Tensor | None, None, Tensor, Tensor]:
        x, saved_bn, out = ctx.saved_tensors
        grad_out, x = channels_last(grad_out), channels_last(x)  # saved-tensor hooks may change the memory format
        out = None if out is None else channels_last(out)
        grad_x, grad_residual = torch.empty_like(x), torch.empty_like(x) if ctx.has_residual else None
        bn = saved_bn.clone()  # written below; a second backward needs the saved one
        given = {"x": x, "y": out, "grad_out": grad_out, "bn": bn, **_chunks(x)}
        launch("bn_grad_partials", BatchNormArgs, grad_residual=grad_residual, **given)
        launch("bn_finalize_grad", BatchNormArgs, **given)
        launch("bn_grad_input", BatchNormArgs, grad_x=grad_x, **given)
        return grad_x, grad_residual, None, bn[GRAD_WEIGHT], bn[GRAD_BIAS]


def bn_state(module: nn.BatchNorm2d) -> Tensor:
    """State (BN_ROWS, channels) with weight and bias filled in."""
    rows = empty(BN_ROWS, module.num_features)
    rows[WEIGHT], rows[BIAS] = module.weight, module.bias
    return rows


def finalize_stats(module: nn.BatchNorm2d, x: Tensor, bn: Tensor, chunks: dict[str, Any]) -> None:
    """Mean, variance and scale from the partial sums of ``chunks``; updates the running statistics."""
    assert module.num_batches_tracked is not None  # by is_plain_bn, as both running statistics
    module.num_batches_tracked.add_(1)
    running = {"running_mean": module.running_mean, "running_var": module.running_var, "momentum": module.momentum}
    launch("bn_finalize_stats", BatchNormArgs, x=x, bn=bn, eps=module.eps, **running, **chunks)


def image_chunks(x: Tensor, partials: Tensor) -> dict[str, Any]:
    """One chunk for each image of x (N, C, H, W), with partial sums (N, 3, C)."""
    count, channels, height, width = x.shape
    return {"partials": partials, "rows": count * height * width, "channels": channels, "chunk_rows": height * width}


def _chunks(x: Tensor) -> dict[str, Any]:
    channels = x.shape[1]
    rows, chunk_rows = x.numel() // channels, max(1, CHUNK_FLOATS // channels)
    partials = empty(-(-rows // chunk_rows), PARTIALS, channels)
    return {"partials": partials, "rows": rows, "channels": channels, "chunk_rows": chunk_rows}
