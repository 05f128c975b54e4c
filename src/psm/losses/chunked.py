"""Sums over anchors, a slice of them at a time, so that memory does not grow with the batch or the bank."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

# (anchor, candidate) pairs held at once: 64 MiB a matrix in float32. The paper's settings stay below, in one slice.
PAIRS = 2**24

Share = Callable[..., tuple[Tensor, Tensor]]


def sum_over_anchors(share: Share, candidates: int, rows: Sequence[Tensor], shared: Sequence[Tensor]) -> tuple:
    """The sums of the two things that ``share(part, *rows of that part, *shared)`` says of each slice of anchors.

    ``rows`` are tensors with a row for each anchor; ``candidates`` is how many vectors an anchor is compared with. The
    first sum is a scalar and has a gradient with respect to ``rows`` and ``shared``, the second has none. Beyond one
    slice a slice's gradient is taken at once and nothing of it is kept: the work is the same, the memory a slice's.
    """
    count = len(rows[0])
    step = max(1, PAIRS // max(candidates, 1))
    if count <= step:
        return share(slice(0, count), *rows, *shared)
    inputs = (*rows, *shared) if torch.is_grad_enabled() else (x.detach() for x in (*rows, *shared))
    return _Slices.apply(share, step, len(rows), *inputs)


class _Slices(torch.autograd.Function):
    @staticmethod
    def forward(ctx, share: Share, step: int, count: int, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        wanted = ctx.needs_input_grad[3:]
        gradients = [torch.zeros_like(x) if wants else None for x, wants in zip(inputs, wanted, strict=True)]
        sums: tuple[Tensor, Tensor] | None = None
        for start in range(0, len(inputs[0]), step):
            part = slice(start, start + step)
            leaves = [x[part] if place < count else x for place, x in enumerate(inputs)]
            leaves = [x.detach().requires_grad_(wants) for x, wants in zip(leaves, wanted, strict=True)]
            with torch.set_grad_enabled(any(wanted)):
                found = share(part, *leaves)
            if any(wanted):
                learned = [place for place, wants in enumerate(wanted) if wants]
                parts = torch.autograd.grad(found[0], [leaves[place] for place in learned])
                for place, gradient in zip(learned, parts, strict=True):
                    (gradients[place][part] if place < count else gradients[place]).add_(gradient)
            found = (found[0].detach(), found[1])
            sums = found if sums is None else (sums[0] + found[0], sums[1] + found[1])
        ctx.save_for_backward(*gradients)
        ctx.mark_non_differentiable(sums[1])
        return sums

    @staticmethod
    def backward(ctx, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # asked for with create_graph: the slices' gradients are constants by now
            raise RuntimeError("a loss taken in slices has no second derivative: it is once_differentiable")
        return None, None, None, *(g if g is None else gradient * g for g in ctx.saved_tensors)
