"""One term of a contrastive loss: its anchors, what they are pulled to, and what they are pushed from."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from psm import ops
from psm.losses.functional import joined_contrastive_loss
from psm.losses.negative_weighting import NegativeWeighting
from psm.losses.objectives import Contrastive, Objective
from psm.mining.batch import MiningBatch
from psm.mining.draws import Draws
from psm.mining.negatives import Anchors, Candidates, Negatives, NegativeSource
from psm.mining.pnsm import NegativeSampler
from psm.mining.positives import PositiveRule, Positives
from psm.mining.processes import take_rows
from psm.utils.devices import prefers_few_kernels


class Term(NamedTuple):
    """What is mined for one term."""

    weight: float
    positives: Positives
    candidates: Candidates
    anchors: Tensor  # (N, D)
    targets: Tensor  # (N, P, D), what each anchor is pulled to


def mine_term(batch: MiningBatch, weight: float, rule: PositiveRule, source: NegativeSource) -> Term:
    """The positives and candidates of a batch by a rule and a source."""
    positives = rule(batch)
    return Term(weight, positives, source(batch, positives), *source.anchors(batch, positives))


@dataclass(frozen=True)
class TermLoss:
    """The loss of a slice of a term's anchors."""

    temperature: float
    sampler: NegativeSampler
    weighting: NegativeWeighting
    objective: Objective
    positives: Positives
    candidates: Candidates
    draws: Draws
    groups: int = 1  # directions that the anchors come from

    @property
    def draws_per_anchor(self) -> int:
        """Numbers that are drawn for each anchor."""
        if not self.objective.uses_negatives or self._constant_rows() is not None:
            return 0
        pairs = 0 if self.sampler.keeps_all else self.sampler.draws_per_pair * self.candidates.columns
        return self.candidates.draws_per_anchor + pairs

    def __call__(self, rows: slice, anchor: Tensor, target: Tensor, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        """Summed loss () of the anchors (A, D) with targets (A, P, D), and sums of chance, kept and allowed (3,)."""
        objective = self.objective
        temperature = self.temperature if objective.uses_negatives else 1.0
        # Over the temperature before the products: dividing the products would be a pass over all pairs.
        scaled = anchor if temperature == 1 else anchor / temperature
        self.draws.seek(rows)
        anchors = Anchors(rows, anchor, scaled, temperature, self.draws, self.groups)
        logits = torch.einsum("nd,npd->np", anchors.scaled, target)
        weights, mask = (take_rows(x, rows, self.groups) for x in (self.positives.weights, self.positives.mask))
        if not objective.uses_negatives:
            none = logits.new_full((len(anchor),), -torch.inf)
            return objective(logits, weights, mask, none).sum(), none.new_zeros(3)
        constant = self._constant_rows()
        if constant is not None:
            log_neg = ops.logsumexp_similarity(anchors.scaled, constant)
            every = torch.full_like(log_neg, len(constant))
            return objective(logits, weights, mask, log_neg).sum(), self._sums(weights, mask, every, every)
        positive = logits[:, 0]
        negatives = self.candidates.logits(anchors, *tensors)
        keep = self._keep(anchors, negatives, positive)
        count = negatives.similarity.shape[1]
        kept, allowed = (torch.full_like(positive, count) if x is None else x.sum(1) for x in (keep, negatives.allowed))
        if self.weighting.is_sum and prefers_few_kernels(anchor.device) and isinstance(objective, Contrastive):
            losses = joined_contrastive_loss(logits, weights, mask, negatives.similarity, keep)
        else:
            log_neg = self.weighting(negatives.similarity, keep, positive, anchors.temperature)
            losses = objective(logits, weights, mask, log_neg)
        return losses.sum(), self._sums(weights, mask, kept, allowed)

    def _keep(self, anchors: Anchors, negatives: Negatives, positive: Tensor) -> Tensor | None:
        """Mask (A, M) of the negatives that count; None: all."""
        if self.sampler.keeps_all:
            return negatives.allowed if self.weighting.is_sum else negatives.mask
        similarity, reference = (x.detach() * anchors.temperature for x in (negatives.similarity, positive))
        return negatives.mask & self.sampler.keep(similarity, reference, self.draws)

    def _sums(self, weights: Tensor, mask: Tensor, kept: Tensor, allowed: Tensor) -> Tensor:
        """Sums (3,) over the anchors of the loss of guessing, and of their kept (A,) and allowed (A,) negatives."""
        with torch.no_grad():
            in_denominator = self.objective.positives_in_denominator
            counted = mask.sum(1) + kept if in_denominator else kept.clamp(min=1)
            chance = weights.sum(1) * counted.to(weights.dtype).log()
            return torch.stack([x.sum().to(chance.dtype) for x in (chance, kept, allowed)])

    def _constant_rows(self) -> Tensor | None:
        """Rows (M, D) that are summed over for every anchor alike, without a matrix of pairs, if that is possible."""
        plain = self.weighting.is_sum and self.sampler.keeps_all
        return self.candidates.constant_rows() if plain else None

    def columns(self, anchors: Tensor) -> int:
        """How many similarities of an anchor are held at once."""
        if not self.objective.uses_negatives:
            return 0
        rows = self._constant_rows()
        # The kernel holds no matrix of products.
        bounded = rows is not None and ops.has_kernel(ops.logsumexp_similarity, anchors, rows)
        return 0 if bounded else self.candidates.count
