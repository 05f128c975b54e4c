"""Everything that knows of several processes; with one process each function is a no-op.

Losses see gathered tensors and are told which anchors of the global batch are this process's (``Processes``).
"""

import logging
import os
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.rank_zero import rank_zero_only
from torch import Tensor, nn

from psm.data.loader import rank_slice
from psm.mining.processes import ONE_PROCESS, Processes
from psm.utils.devices import not_compiled, without_autocast

log = logging.getLogger("psm")


CHILD = "PSM_DECISION"  # environment variable that a process sets for those that Lightning starts from it
_joined: int | None = None


def join(rank: int) -> None:
    """Say which process of a run this is, once that is known."""
    global _joined
    _joined = rank
    vars(rank_zero_only)["rank"] = rank  # Lightning guesses it from the environment when it is imported


def is_rank_zero() -> bool:
    """True unless this is one of several processes of a run and not the first, which writes the run folder.

    Before `join`, the launchers of single runs (torchrun, Lightning) are believed. SLURM is not: its tasks may be runs
    of their own.
    """
    if _joined is not None:
        return _joined == 0
    if "TORCHELASTIC_RUN_ID" not in os.environ and CHILD not in os.environ:
        return True
    return all(os.environ.get(name, "0") == "0" for name in ("RANK", "LOCAL_RANK"))


def shares_machine(devices: str) -> bool:
    """True if a run has several processes on this machine, by the launcher's variables or by ``devices=``."""
    counts = (os.environ.get(name, "") for name in ("LOCAL_WORLD_SIZE", "SLURM_NTASKS_PER_NODE", "SLURM_NTASKS"))
    if "LOCAL_RANK" in os.environ or any(count.isdigit() and int(count) > 1 for count in counts):
        return True
    if devices.lstrip("-").isdigit() and int(devices) > 0:
        return int(devices) > 1
    return torch.cuda.device_count() > 1


def world() -> int:
    """Number of processes (world size)."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def gather(local: Tensor, dim: int = 0) -> Tensor:
    """The tensors of all processes concatenated along ``dim`` in order of rank. Its backward sums over processes.

    Every process backpropagates the loss of the global batch, so the summed slice is ``world()`` times the gradient.
    DDP averages over processes, which gives exactly the gradient of one process on the global batch.
    """
    return local if world() == 1 else _Gather.apply(local, dim)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, dim: int) -> Tensor:
        ctx.dim, ctx.length = dim, local.shape[dim]
        parts = [torch.empty_like(local, memory_format=torch.contiguous_format) for _ in range(world())]
        dist.all_gather(parts, local.contiguous())
        return torch.cat(parts, dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        gradient = gradient.contiguous().clone()
        dist.all_reduce(gradient)
        return gradient.narrow(ctx.dim, dist.get_rank() * ctx.length, ctx.length), None


def rank_part(count: int) -> slice:
    """The consecutive part of so many items that this process takes; parts differ by at most one item."""
    rank = dist.get_rank() if world() > 1 else 0
    return slice(rank * count // world(), (rank + 1) * count // world())


@torch.no_grad()
def gather_rows(local: Tensor) -> Tensor:
    """The rows of all processes (N, ...) in order of rank, where these may have different numbers; no gradient."""
    if world() == 1:
        return local
    lengths = gather(torch.tensor([len(local)], device=local.device)).tolist()
    padded = local.new_zeros((max(lengths), *local.shape[1:]))
    padded[: len(local)] = local
    parts = gather(padded).split(max(max(lengths), 1))
    return torch.cat([part[:length] for part, length in zip(parts, lengths, strict=True)])


@torch.no_grad()
def broadcast_buffers(module: nn.Module) -> None:
    """Give every process the buffers of rank 0; batch norm that is not joined has others on each."""
    if world() > 1:
        for buffer in module.buffers():
            dist.broadcast(buffer, 0)


class ProcessGroup:
    """The processes of a run, as losses see them."""

    @property
    def rank(self) -> int:
        return dist.get_rank()

    @property
    def count(self) -> int:
        return world()

    def rows(self, size: int) -> slice:
        return rank_slice(size, dist.get_rank(), world())

    @not_compiled
    def gather(self, local: Tensor) -> Tensor:
        return gather(local.detach())

    @not_compiled
    def sum(self, local: Tensor) -> Tensor:
        return _SharedSum.apply(local)


def processes() -> Processes:
    """The processes of this run."""
    return ONE_PROCESS if world() == 1 else ProcessGroup()


class _SharedSum(torch.autograd.Function):
    """The sum over processes, each of which goes on from it alike: the sum of their gradients is a multiple."""

    @staticmethod
    def forward(ctx: Any, local: Tensor) -> Tensor:
        total = local.contiguous().clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return world() * gradient


class LargestOfRanks:
    """The largest of the numbers that the processes give, known to all of them at the same call, one call later.

    The answer of a call is read at the next one, when the device has it: no process waits for the others.
    """

    def __init__(self) -> None:
        self.pending: Tensor | None = None

    def __call__(self, number: int, device: torch.device) -> int:
        if world() == 1:
            return number
        answer = 0 if self.pending is None else int(self.pending.item())
        self.pending = torch.full((), float(number), device=device)
        dist.all_reduce(self.pending, dist.ReduceOp.MAX)
        return answer


class _Sum(torch.autograd.Function):
    """The sum over processes; its backward is the same sum."""

    @staticmethod
    def forward(ctx: Any, local: Tensor) -> Tensor:
        total = local.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return _Sum.forward(ctx, gradient.contiguous())


class SyncBatchNormCPU(nn.modules.batchnorm._BatchNorm):
    """Batch norm over the global batch on CPUs, where torch's SyncBatchNorm does not run."""

    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor
    momentum: float

    def _check_input_dim(self, input: Tensor) -> None:
        pass

    def forward(self, input: Tensor) -> Tensor:
        if not self.training or world() == 1:
            return super().forward(input)
        axes = [axis for axis in range(input.dim()) if axis != 1]
        shape = [1, -1] + [1] * (input.dim() - 2)
        count = world() * input.numel() / input.shape[1]
        with without_autocast(input.device):
            values = input.to(torch.promote_types(input.dtype, torch.float32))
            mean = _Sum.apply(values.sum(axes)) / count
            centered = values - mean.view(shape)
            variance = _Sum.apply(centered.square().sum(axes)) / count
            with torch.no_grad():
                self.num_batches_tracked.add_(1)
                unbiased = variance.detach() * (count / (count - 1))
                self.running_mean.lerp_(mean.detach().to(self.running_mean.dtype), self.momentum)
                self.running_var.lerp_(unbiased.to(self.running_var.dtype), self.momentum)
            normed = centered * torch.rsqrt(variance + self.eps).view(shape)
            joined = normed * self.weight.view(shape) + self.bias.view(shape) if self.affine else normed
        return joined.to(input.dtype)


def sync_batchnorm(module: nn.Module, device: torch.device) -> nn.Module:
    """Let batch norm run over the global batch, so that the number of devices does not change the result.

    A layer keeps its state and changes its class in place. Only BatchNorm1d and BatchNorm2d with running statistics and
    a momentum are changed; for other kinds a warning is logged.
    """
    for name, child in module.named_modules():
        if not isinstance(child, nn.modules.batchnorm._BatchNorm) or isinstance(child, nn.SyncBatchNorm):
            continue
        plain = type(child) in (nn.BatchNorm1d, nn.BatchNorm2d) and child.track_running_stats
        if not plain or child.momentum is None:
            log.warning(
                "%s (%s) normalizes each device's images by themselves.",
                name,
                type(child).__name__,
            )
        elif device.type == "cpu":
            child.__class__ = SyncBatchNormCPU
        else:
            child.__class__ = nn.SyncBatchNorm
            vars(child)["process_group"] = None
    return module
