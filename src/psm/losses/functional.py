"""Losses as pure functions. The contrastive one works in log space: no exponential can overflow."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import normalize, relu

from psm.mining.processes import ONE_PROCESS, Processes, take_rows
from psm.ops import masked_logsumexp


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


def joined_contrastive_loss(
    logits: Tensor, weights: Tensor, mask: Tensor, negatives: Tensor, keep: Tensor | None
) -> Tensor:
    """``contrastive_loss`` with the plain sum over negatives, by one log-softmax: few operations for an accelerator.

    Args:
        logits: (N, P) of the positives.
        weights: (N, P), not differentiated.
        mask: (N, P) which positives exist.
        negatives: (N, M) logits of the negatives.
        keep: (N, M) which of them count; None: all.
    """
    least = torch.finfo(logits.dtype).min / 4  # finite: what does not exist has the weight 0, and 0 * inf is no number
    if keep is None:
        joined = torch.cat([torch.where(mask, logits, least), negatives], 1)
    else:
        joined = torch.where(torch.cat([mask, keep], 1), torch.cat([logits, negatives], 1), least)
    shares = joined.log_softmax(1)[:, : logits.shape[1]]
    return -(weights.detach() * mask * shares).sum(1)


def decoupled_loss(logits: Tensor, weights: Tensor, mask: Tensor, log_neg: Tensor) -> Tensor:
    """``contrastive_loss`` without the positives in the denominator: sum_i w_i (log_neg - l_i) (Yeh et al. 2022).

    An anchor without negatives is pulled alone.
    """
    pushed = log_neg.masked_fill(log_neg == -torch.inf, 0.0)
    return (weights.detach() * (pushed[:, None] - logits)).masked_fill(~mask, 0.0).sum(1)


def byol_loss(similarity: Tensor, weights: Tensor, mask: Tensor) -> Tensor:
    """BYOL for each query (N,): sum_i w_i (2 - 2 s_i), the squared distance of unit vectors, over its positives.

    Args:
        similarity: (N, P) to each positive.
        weights: (N, P), not differentiated.
        mask: (N, P) which positives exist.
    """
    return (weights.detach() * (2 - 2 * similarity)).masked_fill(~mask, 0.0).sum(1)


def vicreg_loss(
    z1: Tensor,
    z2: Tensor,
    invariance: float = 25.0,
    variance: float = 25.0,
    covariance: float = 1.0,
    processes: Processes = ONE_PROCESS,
) -> Tensor:
    """VICReg of the projections (N, D) of two views, not normalized.

    Args:
        z1: projections of view 1.
        z2: projections of view 2.
        invariance: weight of the mean squared error between the views.
        variance: weight of the hinge on each dimension's standard deviation (target 1; mean of the two branches).
        covariance: weight of the squared off-diagonal covariances over D (sum of the two branches).
        processes: that have the same projections; each multiplies its own rows for the covariances.
    """
    count, width = z1.shape
    hinge, redundancy = z1.new_zeros(()), z1.new_zeros(())
    for z in (z1, z2):
        centered = z - z.mean(0)
        hinge = hinge + relu(1 - torch.sqrt(centered.square().sum(0) / (count - 1) + 1e-4)).mean() / 2
        own = take_rows(centered, processes.rows(count))
        joint = processes.sum(own.T @ own) / (count - 1)
        redundancy = redundancy + (joint.square().sum() - joint.diagonal().square().sum()) / width
    return invariance * (z1 - z2).square().mean() + variance * hinge + covariance * redundancy


def redundancy_loss(pairs: Sequence[tuple[Tensor, Tensor]], processes: Processes = ONE_PROCESS) -> Tensor:
    """All4One's redundancy term: the dimensions of two views correlate with themselves and with no other.

    C = normalize(key)^T normalize(z), both over the batch; the term is half the root mean square of C_ii - 1 and half
    that of C_ij, i != j, the means taken over all pairs too.

    Args:
        pairs: projections (N, D) and keys (N, D) of another view, of each direction; not normalized.
        processes: that have the same pairs; each multiplies its own rows.
    """
    half = (torch.bfloat16, torch.float16)
    on, off = [], []
    for pair in pairs:
        z, key = (normalize(x.float() if x.dtype in half else x, dim=0) for x in pair)
        width = z.shape[1]
        rows = processes.rows(len(z))
        joint = processes.sum(take_rows(key, rows).T @ take_rows(z, rows))
        diagonal = joint.diagonal()
        on.append((diagonal - 1).square().mean())
        off.append((joint.square().sum() - diagonal.square().sum()) / max(1, width * (width - 1)))
    tiny = torch.finfo(on[0].dtype).tiny  # the root has no gradient at 0
    roots = [torch.stack(part).mean().clamp(min=tiny).sqrt() for part in (on, off)]
    return torch.stack(roots).mean()
