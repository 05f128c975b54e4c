"""What a query's negatives weigh together: the estimates of the negative mass, in log space.

Each takes the logits (N, M) of the candidates and which of them are kept (N, M), some also the logit of the positive
(N,), and gives the log of the mass (N,), -inf where nothing is kept.
"""

import math

import torch
from torch import Tensor

from psm.losses.functional import masked_logsumexp


def total(logits: Tensor, keep: Tensor | None = None) -> Tensor:
    """The plain sum of exp: InfoNCE. Without ``keep`` all are kept."""
    return masked_logsumexp(logits, keep)


def debiased(logits: Tensor, keep: Tensor, positive: Tensor, temperature: float, tau: float) -> Tensor:
    """DCL: max((sum - n tau pos) / (1 - tau), n e^(-1/t)), for a share tau of false negatives."""
    return _without_false_negatives(total(logits, keep), keep, positive, temperature, tau)


def hard(logits: Tensor, keep: Tensor, positive: Tensor, temperature: float, tau: float, beta: float) -> Tensor:
    """HCL: as debiased, with the sum replaced by sum(neg^(1 + beta)) / mean(neg^beta)."""
    count = keep.sum(1).clamp(min=1).to(logits.dtype)
    weighted = masked_logsumexp((1 + beta) * logits, keep)
    mean = masked_logsumexp(beta * logits, keep).masked_fill(~keep.any(1), 0.0) - count.log()
    return _without_false_negatives(weighted - mean, keep, positive, temperature, tau)


def bayesian(logits: Tensor, keep: Tensor, tau: float, alpha: float, beta: float) -> Tensor:
    """BCL: sum(omega_i neg_i) with omega from each negative's rank among the query's negatives."""
    return masked_logsumexp(logits + bayesian_weights(logits, keep, tau, alpha, beta).log(), keep)


@torch.no_grad()
def bayesian_weights(similarity: Tensor, keep: Tensor, tau: float, alpha: float, beta: float) -> Tensor:
    """omega (N, M) of BCL from the share u of a query's negatives that are no more similar than each.

    By sorting, M log M a query; the published code compares all pairs.
    """
    others = similarity.masked_fill(~keep, torch.inf)  # behind all that count
    ordered = others.sort(1).values.contiguous()
    rank = torch.searchsorted(ordered, others.contiguous(), right=True).to(similarity.dtype)
    share = (rank / keep.sum(1, keepdim=True).clamp(min=1)).clamp(max=1.0)
    rest = 1 - tau
    a = (1 - 2 * alpha) * (rest - tau) + 1e-3
    b = 2 * (alpha * rest + (1 - alpha) * tau)
    cdf = (-b + torch.sqrt(b * b + 4 * a * share)) / (2 * a)
    phi1, phi2 = 2 * (1 - cdf), 2 * cdf
    true = alpha * phi1 + (1 - alpha) * phi2
    false = (1 - alpha) * phi1 + alpha * phi2
    hard_true = (alpha * (1 - beta) * phi1 + (1 - alpha) * beta * phi2) / (
        alpha * (1 - beta) + (1 - alpha) * beta + 1e-3
    )
    return (hard_true / (true * rest + false * tau)).clamp(min=torch.finfo(similarity.dtype).tiny)


def _without_false_negatives(log_sum: Tensor, keep: Tensor, positive: Tensor, temperature: float, tau: float) -> Tensor:
    """log of max((sum - n tau pos) / (1 - tau), n e^(-1/t))."""
    some = keep.any(1)
    log_count = keep.sum(1).clamp(min=1).to(log_sum.dtype).log()
    floor = log_count - 1 / temperature
    if tau > 0:
        log_sum = log_sum.masked_fill(~some, 0.0)
        # exp of at most 1 is all that is needed: beyond it the difference is negative and the floor holds.
        share = (log_count + math.log(tau) + positive - log_sum).clamp(max=0.0).exp()
        rest = (1 - share).clamp(min=torch.finfo(share.dtype).tiny)
        log_sum = log_sum + rest.log() - math.log1p(-tau)
    return torch.maximum(log_sum, floor).masked_fill(~some, -torch.inf)
