"""Objectives: from similarities (or projections) to a loss."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from psm.config.parts import Part, PartRegistry, setting
from psm.losses.functional import byol_loss, contrastive_loss, decoupled_loss, vicreg_loss
from psm.mining.processes import ONE_PROCESS, Processes


@dataclass(frozen=True)
class Objective(Part, ABC):
    """Base of the objectives over anchors, their positives and negatives."""

    uses_negatives = True  # False: neither negatives nor a temperature
    positives_in_denominator = True  # False: negatives alone; decides what guessing would give

    @abstractmethod
    def __call__(self, logits: Tensor, weights: Tensor, mask: Tensor, log_neg: Tensor) -> Tensor:
        """Loss of each anchor (N,).

        Args:
            logits: (N, P) similarities to the positives, over the temperature if there are negatives.
            weights: (N, P) of the positives, not differentiated.
            mask: (N, P) which positives exist.
            log_neg: (N,) log of what the negatives weigh, -inf where there are none.
        """
        raise NotImplementedError

    def validate(self, method: Any) -> Iterator[str]:
        if not self.uses_negatives and method.loss.hard_weight:
            yield (
                f"loss.hard_weight={method.loss.hard_weight} is a contrastive term, and objective.name="
                f"{self.part_name} has none: give loss.hard_weight=0."
            )


@dataclass(frozen=True)
class ProjectionObjective(Objective):
    """Base of the objectives that compare the projections of both views directly; nothing is mined."""

    uses_negatives = False

    def __call__(self, logits: Tensor, weights: Tensor, mask: Tensor, log_neg: Tensor) -> Tensor:
        raise TypeError(f"{type(self).__name__} compares projections: use method_loss, which has them.")

    @abstractmethod
    def on_projections(self, z1: Tensor, z2: Tensor) -> Tensor:
        """Loss () of the projections (N, D) of two views, not normalized."""
        raise NotImplementedError

    def shared_out(self, z1: Tensor, z2: Tensor, processes: Processes) -> Tensor:
        """The same where several processes have the batch. Plainly each of them computes all of it."""
        return self.on_projections(z1, z2)

    def validate(self, method: Any) -> Iterator[str]:
        yield from super().validate(method)
        if method.target.enabled or method.predictor.enabled:
            yield (
                f"objective.name={self.part_name} compares projections of one network: give target.enabled=false and "
                "predictor.enabled=false."
            )
        if method.loss.redundancy_weight:
            yield (
                f"loss.redundancy_weight is a term beside directions, and objective.name={self.part_name} has none: "
                "leave it at 0."
            )
        if method.positives.part_name != "view":
            yield (
                f"positives.rule={method.positives.part_name} has no place in objective.name={self.part_name}: leave "
                "it at view."
            )


OBJECTIVES: PartRegistry[Objective] = PartRegistry("objective", "name", Objective)  # type: ignore[type-abstract]


@OBJECTIVES.register("contrastive")
@dataclass(frozen=True)
class Contrastive(Objective):
    """InfoNCE with several weighted positives, all of them in the denominator (eq. 4, 6)."""

    def __call__(self, logits: Tensor, weights: Tensor, mask: Tensor, log_neg: Tensor) -> Tensor:
        return contrastive_loss(logits, weights, mask, log_neg)


@OBJECTIVES.register("decoupled")
@dataclass(frozen=True)
class Decoupled(Objective):
    """Contrastive without the positives in the denominator (decoupled contrastive learning)."""

    positives_in_denominator = False

    def __call__(self, logits: Tensor, weights: Tensor, mask: Tensor, log_neg: Tensor) -> Tensor:
        return decoupled_loss(logits, weights, mask, log_neg)


@OBJECTIVES.register("byol")
@dataclass(frozen=True)
class BYOL(Objective):
    """Squared distance between unit vectors, 2 - 2 s; no negatives."""

    uses_negatives = False

    def __call__(self, logits: Tensor, weights: Tensor, mask: Tensor, log_neg: Tensor) -> Tensor:
        return byol_loss(logits, weights, mask)

    def validate(self, method: Any) -> Iterator[str]:
        yield from super().validate(method)
        if not (method.target.enabled or method.predictor.enabled):
            yield "objective.name=byol collapses without a target or a predictor: give target.enabled=true."


@OBJECTIVES.register("vicreg")
@dataclass(frozen=True)
class VICReg(ProjectionObjective):
    """Invariance, variance and covariance of the projections; no negatives."""

    invariance: float = setting(25.0, "weight of the distance between the views", at_least=0)
    variance: float = setting(25.0, "weight of each dimension's standard deviation falling short of 1", at_least=0)
    covariance: float = setting(1.0, "weight of the covariance between dimensions", at_least=0)

    def on_projections(self, z1: Tensor, z2: Tensor) -> Tensor:
        return self.shared_out(z1, z2, ONE_PROCESS)

    def shared_out(self, z1: Tensor, z2: Tensor, processes: Processes) -> Tensor:
        half = (torch.bfloat16, torch.float16)
        z1, z2 = (z.float() if z.dtype in half else z for z in (z1, z2))
        return vicreg_loss(z1, z2, self.invariance, self.variance, self.covariance, processes)
