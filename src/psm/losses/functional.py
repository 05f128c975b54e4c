"""Losses as pure functions. The contrastive one works in log space: no exponential can overflow."""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import relu

from psm.kernels import similarity as products


def masked_logsumexp(values: Tensor, keep: Tensor | None = None) -> Tensor:
    """log of the sum of exp over the kept values of a row; -inf, with a zero gradient, where none is kept."""
    return _MaskedLogSumExp.apply(values, keep)


class _MaskedLogSumExp(torch.autograd.Function):
    """With half the passes over the values, and half the memory, of torch's own functions put together."""

    @staticmethod
    def forward(ctx, values: Tensor, keep: Tensor | None) -> Tensor:
        least = torch.finfo(values.dtype).min
        if keep is not None:
            values = values.masked_fill(~keep, least)
        if not values.shape[-1]:
            ctx.save_for_backward(values, torch.ones(*values.shape[:-1], 1, dtype=torch.bool, device=values.device))
            return values.new_full(values.shape[:-1], -torch.inf)
        largest = values.amax(-1, keepdim=True)
        none = largest <= least
        shares = values.softmax(-1)  # a row at a time in the cache; the largest is one over the sum of exp(. - largest)
        ctx.save_for_backward(shares, none)
        return (largest - shares.amax(-1, keepdim=True).log()).masked_fill_(none, -torch.inf).squeeze(-1)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        shares, none = ctx.saved_tensors
        return shares * gradient.unsqueeze(-1).masked_fill(none, 0.0), None


def logsumexp_of_products(queries: Tensor, rows: Tensor) -> Tensor:
    """log of the sum over rows (M, D), which are constants, of exp(q . r) for each of the queries (N, D).

    The gradient is the mean of the rows under the softmax of these products. Where ``products`` are compiled, their
    matrix is not written and memory does not grow with the bank.
    """
    if products.summable(queries, rows):
        return _LogSumExpOfProducts.apply(queries, rows)
    return masked_logsumexp(queries @ rows.to(queries.dtype).T)


def holds_no_products(queries: Tensor, rows: Tensor) -> bool:
    """True if ``logsumexp_of_products`` needs no memory for the products of these queries and rows."""
    return products.summable(queries, rows)


class _LogSumExpOfProducts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, queries: Tensor, rows: Tensor) -> Tensor:
        found, mean = products.log_sum_exp(queries, rows)
        ctx.save_for_backward(mean)
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.saved_tensors[0] * gradient[:, None], None


def contrastive_loss(logits: Tensor, weights: Tensor, mask: Tensor, log_neg: Tensor) -> Tensor:
    """Eq. 4 and 6 for each anchor (N,): sum_i w_i (log(sum_m exp(l_m) + exp(log_neg)) - l_i) over its positives.

    Args:
        logits: (N, P) similarity to each positive over the temperature.
        weights: (N, P), not differentiated.
        mask: (N, P) which positives exist; all of those stand in the denominator.
        log_neg: (N,) log of what the negatives weigh, -inf where there are none.
    """
    denominator = torch.logaddexp(masked_logsumexp(logits, mask), log_neg)
    return (weights.detach() * (denominator[:, None] - logits)).masked_fill(~mask, 0.0).sum(1)


def byol_loss(similarity: Tensor, weights: Tensor, mask: Tensor) -> Tensor:
    """BYOL for each query (N,): sum_i w_i (2 - 2 s_i), the squared distance of unit vectors, over its positives.

    Args:
        similarity: (N, P) to each positive.
        weights: (N, P), not differentiated.
        mask: (N, P) which positives exist.
    """
    return (weights.detach() * (2 - 2 * similarity)).masked_fill(~mask, 0.0).sum(1)


def vicreg_loss(
    z1: Tensor, z2: Tensor, invariance: float = 25.0, variance: float = 25.0, covariance: float = 1.0
) -> Tensor:
    """VICReg of the projections (N, D) of two views, not normalized.

    Args:
        z1: projections of view 1.
        z2: projections of view 2.
        invariance: weight of the mean squared error between the views.
        variance: weight of the hinge on each dimension's standard deviation (target 1; mean of the two branches).
        covariance: weight of the squared off-diagonal covariances over D (sum of the two branches).
    """
    count, width = z1.shape
    hinge, redundancy = z1.new_zeros(()), z1.new_zeros(())
    for z in (z1, z2):
        centered = z - z.mean(0)
        hinge = hinge + relu(1 - torch.sqrt(centered.square().sum(0) / (count - 1) + 1e-4)).mean() / 2
        joint = centered.T @ centered / (count - 1)
        redundancy = redundancy + (joint.square().sum() - joint.diagonal().square().sum()) / width
    return invariance * (z1 - z2).square().mean() + variance * hinge + covariance * redundancy
