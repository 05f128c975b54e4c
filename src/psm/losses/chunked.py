"""Sums over anchors, a chunk of them at a time, so that memory does not grow with the batch or the bank."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

# (anchor, candidate) pairs held at once: 64 MiB a matrix in float32. The paper's settings stay below, in one chunk.
PAIRS = 2**24

ChunkLoss = Callable[..., tuple[Tensor, Tensor]]


def sum_over_anchors(
    chunk_loss: ChunkLoss, candidates: int, per_anchor: Sequence[Tensor], shared: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """The sums of the two tensors that ``chunk_loss(rows, *per_anchor[rows], *shared)`` gives for each chunk.

    Beyond one chunk, a chunk's gradient is computed at once and nothing of it is kept: the work is the same, the
    memory that of one chunk.

    Args:
        chunk_loss: gives a scalar with a gradient, and a tensor without.
        candidates: how many vectors an anchor is compared with.
        per_anchor: tensors with a row for each anchor.
        shared: tensors that all chunks use.
    """
    count = len(per_anchor[0])
    step = max(1, PAIRS // max(candidates, 1))
    if count <= step:
        return chunk_loss(slice(0, count), *per_anchor, *shared)
    inputs = [x if torch.is_grad_enabled() else x.detach() for x in (*per_anchor, *shared)]
    return _Chunks.apply(chunk_loss, step, len(per_anchor), *inputs)


class _Chunks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, chunk_loss: ChunkLoss, step: int, num_per_anchor: int, *inputs: Tensor
    ) -> tuple[Tensor, Tensor]:
        wanted = ctx.needs_input_grad[3:]
        gradients = [torch.zeros_like(x) if wants else None for x, wants in zip(inputs, wanted, strict=True)]
        sums: list[tuple[Tensor, Tensor]] = []
        for start in range(0, len(inputs[0]), step):
            rows = slice(start, start + step)
            parts = [x[rows] if index < num_per_anchor else x for index, x in enumerate(inputs)]
            leaves = [x.detach().requires_grad_(wants) for x, wants in zip(parts, wanted, strict=True)]
            with torch.set_grad_enabled(any(wanted)):
                loss, others = chunk_loss(rows, *leaves)
            if any(wanted):
                into = [g[rows] if index < num_per_anchor else g for index, g in enumerate(gradients) if g is not None]
                found = torch.autograd.grad(loss, [x for x, wants in zip(leaves, wanted, strict=True) if wants])
                for total, gradient in zip(into, found, strict=True):
                    total.add_(gradient)
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
        return None, None, None, *(g if g is None else grad * g for g in ctx.saved_tensors)
