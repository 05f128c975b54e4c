"""The objectives as pure functions. The contrastive one works in log space: no exponential can overflow."""

import torch
from torch import Tensor


def masked_logsumexp(values: Tensor, keep: Tensor, dim: int = -1) -> Tensor:
    """log of the sum of exp over the kept values; -inf, with a zero gradient, where none is kept."""
    some = keep.any(dim, keepdim=True)
    guarded = values.masked_fill(~keep & some, -torch.inf)  # an empty row stays finite until its sum is replaced
    return guarded.logsumexp(dim).masked_fill(~some.squeeze(dim), -torch.inf)


def contrastive(logits: Tensor, weights: Tensor, present: Tensor, log_mass: Tensor) -> Tensor:
    """Eq. 4 and 6 per anchor (N,): sum_i w_i (log(sum_m exp(l_m) + mass) - l_i) over an anchor's positives.

    ``logits`` (N, P): similarity to each positive over the temperature; ``weights`` (N, P), not differentiated;
    ``present`` (N, P): which of them exist, all of those stand in the denominator; ``log_mass`` (N,): log of the
    negatives' mass, -inf where there are none.
    """
    denominator = torch.logaddexp(masked_logsumexp(logits, present), log_mass)
    return (weights.detach() * (denominator[:, None] - logits)).masked_fill(~present, 0.0).sum(1)
