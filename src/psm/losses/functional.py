"""The objectives as pure functions. The contrastive one works in log space: no exponential can overflow."""

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


def contrastive(logits: Tensor, weights: Tensor, present: Tensor, log_mass: Tensor) -> Tensor:
    """Eq. 4 and 6 per anchor (N,): sum_i w_i (log(sum_m exp(l_m) + mass) - l_i) over an anchor's positives.

    ``logits`` (N, P): similarity to each positive over the temperature; ``weights`` (N, P), not differentiated;
    ``present`` (N, P): which of them exist, all of those stand in the denominator; ``log_mass`` (N,): log of the
    negatives' mass, -inf where there are none.
    """
    denominator = torch.logaddexp(masked_logsumexp(logits, present), log_mass)
    return (weights.detach() * (denominator[:, None] - logits)).masked_fill(~present, 0.0).sum(1)


def regression(similarity: Tensor, weights: Tensor, present: Tensor) -> Tensor:
    """BYOL per query (N,): sum_i w_i (2 - 2 s_i), the squared distance between unit vectors, over its positives."""
    return (weights.detach() * (2 - 2 * similarity)).masked_fill(~present, 0.0).sum(1)


def variance_covariance(
    z1: Tensor, z2: Tensor, invariance: float = 25.0, variance: float = 25.0, covariance: float = 1.0
) -> Tensor:
    """VICReg of the projections (N, D) of two views, not normalized.

    invariance * MSE + variance * hinge on each dimension's deviation (target 1; mean of the branches) + covariance *
    squared off-diagonal covariances over D (sum of the branches).
    """
    count, width = z1.shape
    spread, redundancy = 0.0, 0.0
    for z in (z1, z2):
        centered = z - z.mean(0)
        spread = spread + relu(1 - torch.sqrt(centered.square().sum(0) / (count - 1) + 1e-4)).mean() / 2
        joint = centered.T @ centered / (count - 1)
        redundancy = redundancy + (joint.square().sum() - joint.diagonal().square().sum()) / width
    return invariance * (z1 - z2).square().mean() + variance * spread + covariance * redundancy
