"""Sums over anchors, a chunk of them at a time, so that memory does not grow with the batch or the bank."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from psm.mining.processes import take_rows
from psm.utils.devices import matrix_elements, not_compiled

# (anchor, candidate) pairs held at once: 64 MiB a matrix in float32. The paper's settings stay below, in one chunk.
PAIRS = 2**24
DEVICE_PAIRS_SHARE = 1 / 64  # of an accelerator's memory that a matrix takes instead: fewer kernels

ChunkLoss = Callable[..., tuple[Tensor, Tensor]]


def sum_over_anchors(
    chunk_loss: ChunkLoss,
    candidates: int,
    per_anchor: Sequence[Tensor],
    shared: Sequence[Tensor],
    anchors: slice | None = None,
    groups: int = 1,
) -> tuple[Tensor, Tensor]:
    """The sums of the two tensors that ``chunk_loss(rows, *per_anchor[rows], *shared)`` gives for each chunk.

    Beyond one chunk, a chunk's gradient is computed at once and nothing of it is kept: the work is the same, the
    memory that of one chunk.

    Args:
        chunk_loss: gives a scalar with a gradient, and a tensor without.
        candidates: how many vectors an anchor is compared with.
        per_anchor: tensors with a row for each anchor.
        shared: tensors that all chunks use.
        anchors: sum over these alone, in the chunks that all of them would have; None: all.
        groups: of anchors, one after another; a chunk has the same rows of each.
    """
    anchors = slice(0, len(per_anchor[0]) // groups) if anchors is None else anchors
    step = anchors_at_once(groups * candidates, per_anchor[0].device)
    starts = [anchors.start, *range((anchors.start // step + 1) * step, anchors.stop, step)]
    chunks = [slice(*ends) for ends in zip(starts, [*starts[1:], anchors.stop], strict=True)]
    if len(chunks) == 1:
        return chunk_loss(anchors, *(take_rows(x, anchors, groups) for x in per_anchor), *shared)
    return _sum_over_chunks(chunk_loss, chunks, groups, per_anchor, shared)


@not_compiled
def _sum_over_chunks(
    chunk_loss: ChunkLoss, chunks: list[slice], groups: int, per_anchor: Sequence[Tensor], shared: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """The sums over several chunks; not compiled, since each chunk has a backward pass of its own."""
    inputs = [x if torch.is_grad_enabled() else x.detach() for x in (*per_anchor, *shared)]
    return _Chunks.apply(chunk_loss, chunks, groups, len(per_anchor), *inputs)


def anchors_at_once(candidates: int, device: torch.device) -> int:
    """Anchors of a chunk, where each is compared with so many candidates."""
    pairs = PAIRS if device.type == "cpu" else matrix_elements(device, DEVICE_PAIRS_SHARE)
    return max(1, pairs // max(candidates, 1))


class _Chunks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, chunk_loss: ChunkLoss, chunks: list[slice], groups: int, num_per_anchor: int, *inputs: Tensor
    ) -> tuple[Tensor, Tensor]:
        wanted = ctx.needs_input_grad[4:]
        gradients = [torch.zeros_like(x) if wants else None for x, wants in zip(inputs, wanted, strict=True)]
        sums: list[tuple[Tensor, Tensor]] = []
        for rows in chunks:
            parts = [take_rows(x, rows, groups) if index < num_per_anchor else x for index, x in enumerate(inputs)]
            leaves = [x.detach().requires_grad_(wants) for x, wants in zip(parts, wanted, strict=True)]
            with torch.set_grad_enabled(any(wanted)):
                loss, others = chunk_loss(rows, *leaves)
            if any(wanted):
                found = iter(torch.autograd.grad(loss, [x for x, wants in zip(leaves, wanted, strict=True) if wants]))
                for index, total in enumerate(gradients):
                    if total is not None:
                        into = total.unflatten(0, (groups, -1))[:, rows] if index < num_per_anchor else total
                        into.add_(next(found).view(into.shape))
            before = sums[-1] if sums else None
            sums = [(loss.detach(), others) if before is None else (before[0] + loss.detach(), before[1] + others)]
        ctx.save_for_backward(*gradients)
        ctx.mark_non_differentiable(sums[0][1])
        return sums[0]

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # asked for with create_graph: the chunks' gradients are constants by now
            raise RuntimeError("a loss computed in chunks has no second derivative: it is once_differentiable")
        grad = grad_outputs[0]
        return None, None, None, None, *(g if g is None else grad * g for g in ctx.saved_tensors)
