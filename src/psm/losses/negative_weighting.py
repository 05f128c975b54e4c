"""Negative weightings: estimates of what a query's negatives weigh together, in log space."""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from psm.config.parts import Part, PartRegistry, setting
from psm.losses.functional import masked_logsumexp


@dataclass(frozen=True)
class NegativeWeighting(Part, ABC):
    """Base of the weightings."""

    is_sum = False  # True: the plain sum, for which ``keep`` may be None and no positive is needed

    @abstractmethod
    def __call__(self, logits: Tensor, keep: Tensor | None, positive: Tensor, temperature: float) -> Tensor:
        """Log of the negatives' weight (N,), -inf where none is kept.

        Args:
            logits: (N, M) of the candidates.
            keep: (N, M) mask of the candidates that count; None: all.
            positive: (N,) logit of the positive.
            temperature: what similarities were divided by.
        """
        raise NotImplementedError

    def validate(self, method: Any) -> Iterator[str]:
        if not self.is_sum and not method.objective.uses_negatives:
            yield f"objective.name={method.objective.part_name} has no negatives for weighting.name={self.part_name}."


WEIGHTINGS: PartRegistry[NegativeWeighting] = PartRegistry("weighting", "name", NegativeWeighting)  # type: ignore[type-abstract]


@WEIGHTINGS.register("sum")
@dataclass(frozen=True)
class Sum(NegativeWeighting):
    """InfoNCE: the plain sum of exp(logit)."""

    is_sum = True

    def __call__(self, logits: Tensor, keep: Tensor | None, positive: Tensor, temperature: float) -> Tensor:
        return masked_logsumexp(logits, keep)


@WEIGHTINGS.register("debiased")
@dataclass(frozen=True)
class Debiased(NegativeWeighting):
    """DCL: max((sum - n tau pos) / (1 - tau), n e^(-1/t)), for a share tau of false negatives."""

    tau: float = setting(0.1, "assumed share of false negatives", at_least=0, at_most=0.99)

    def __call__(self, logits: Tensor, keep: Tensor | None, positive: Tensor, temperature: float) -> Tensor:
        keep = every(logits) if keep is None else keep
        return debias(masked_logsumexp(logits, keep), keep, positive, temperature, self.tau)


@WEIGHTINGS.register("hard")
@dataclass(frozen=True)
class Hard(NegativeWeighting):
    """HCL: as debiased, with the sum replaced by sum(neg^(1 + beta)) / mean(neg^beta)."""

    tau: float = setting(0.1, "assumed share of false negatives", at_least=0, at_most=0.99)
    beta: float = setting(1.0, "how much more hard negatives count", at_least=0)

    def __call__(self, logits: Tensor, keep: Tensor | None, positive: Tensor, temperature: float) -> Tensor:
        keep = every(logits) if keep is None else keep
        count = keep.sum(1).clamp(min=1).to(logits.dtype)
        weighted = masked_logsumexp((1 + self.beta) * logits, keep)
        mean = masked_logsumexp(self.beta * logits, keep).masked_fill(~keep.any(1), 0.0) - count.log()
        return debias(weighted - mean, keep, positive, temperature, self.tau)


@WEIGHTINGS.register("bayesian")
@dataclass(frozen=True)
class Bayesian(NegativeWeighting):
    """BCL: sum(omega_i neg_i) with omega from each negative's rank among the query's negatives."""

    tau: float = setting(0.1, "assumed share of false negatives", at_least=0, at_most=0.99)
    alpha: float = setting(
        0.9,
        "assumed quality of the encoder, from 0.5 to 1 (its authors: CIFAR-10 0.9, CIFAR-100 0.7, TinyImageNet 0.8)",
        at_least=0,
        at_most=1,
    )
    beta: float = setting(
        0.9,
        "how much more hard negatives count (its authors: CIFAR-10 0.9, CIFAR-100 and TinyImageNet 1)",
        at_least=0,
        at_most=1,
    )

    def __call__(self, logits: Tensor, keep: Tensor | None, positive: Tensor, temperature: float) -> Tensor:
        keep = every(logits) if keep is None else keep
        weights = bayesian_weights(logits, keep, self.tau, self.alpha, self.beta)
        return masked_logsumexp(logits + weights.log(), keep)


def every(logits: Tensor) -> Tensor:
    """A mask that keeps all."""
    return torch.ones_like(logits, dtype=torch.bool)


@torch.no_grad()
def bayesian_weights(similarity: Tensor, keep: Tensor, tau: float, alpha: float, beta: float) -> Tensor:
    """omega (N, M) of BCL from the empirical CDF of a query's negatives.

    Ranks by sorting, O(M log M) a query; the published code compares all pairs.

    Args:
        similarity: (N, M) similarities or logits.
        keep: (N, M) mask of the negatives that count.
        tau: assumed share of false negatives.
        alpha: assumed quality of the encoder.
        beta: how much more hard negatives count.
    """
    others = similarity.masked_fill(~keep, torch.inf)  # ranked behind all that count
    ordered = others.sort(1).values.contiguous()
    rank = torch.searchsorted(ordered, others.contiguous(), right=True).to(similarity.dtype)
    u = (rank / keep.sum(1, keepdim=True).clamp(min=1)).clamp(max=1.0)
    rest = 1 - tau
    a = (1 - 2 * alpha) * (rest - tau) + 1e-3
    b = 2 * (alpha * rest + (1 - alpha) * tau)
    cdf = (-b + torch.sqrt(b * b + 4 * a * u)) / (2 * a)
    phi1, phi2 = 2 * (1 - cdf), 2 * cdf
    true = alpha * phi1 + (1 - alpha) * phi2
    false = (1 - alpha) * phi1 + alpha * phi2
    hard_true = (alpha * (1 - beta) * phi1 + (1 - alpha) * beta * phi2) / (
        alpha * (1 - beta) + (1 - alpha) * beta + 1e-3
    )
    return (hard_true / (true * rest + false * tau)).clamp(min=torch.finfo(similarity.dtype).tiny)


def debias(log_sum: Tensor, keep: Tensor, positive: Tensor, temperature: float, tau: float) -> Tensor:
    """log of max((sum - n tau pos) / (1 - tau), n e^(-1/t)).

    Args:
        log_sum: (N,) log of the sum over the n kept negatives.
        keep: (N, M) mask of the negatives that count.
        positive: (N,) logit of the positive.
        temperature: t.
        tau: assumed share of false negatives.
    """
    some = keep.any(1)
    log_count = keep.sum(1).clamp(min=1).to(log_sum.dtype).log()
    floor = log_count - 1 / temperature
    if tau > 0:
        log_sum = log_sum.masked_fill(~some, 0.0)
        # Clamped at 1: beyond it the difference is negative and the floor holds.
        share = (log_count + math.log(tau) + positive - log_sum).clamp(max=0.0).exp()
        rest = (1 - share).clamp(min=torch.finfo(share.dtype).tiny)
        log_sum = log_sum + rest.log() - math.log1p(-tau)
    return torch.maximum(log_sum, floor).masked_fill(~some, -torch.inf)
