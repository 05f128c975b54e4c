"""The loss of one direction, from queries, keys and a memory bank, put together from open parts."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from psm import ops
from psm.losses.chunked import anchors_at_once, sum_over_anchors
from psm.losses.functional import joined_contrastive_loss
from psm.losses.negative_weighting import WEIGHTINGS, NegativeWeighting
from psm.losses.objectives import OBJECTIVES, Contrastive, Objective, ProjectionObjective
from psm.mining.batch import MiningBatch
from psm.mining.draws import Draws, as_draws
from psm.mining.memory_bank import MemoryBank
from psm.mining.negatives import NEGATIVES, Anchors, Candidates, Negatives, NegativeSource, ViewNegatives
from psm.mining.pnsm import SAMPLERS, NegativeSampler
from psm.mining.positives import POSITIVES, PositiveRule, Positives, ViewPositives
from psm.mining.processes import ONE_PROCESS

NORM_TOLERANCE = 1e-2  # of |v| from 1: bfloat16 rounds by less


class LossOutput(NamedTuple):
    """The loss () and its metrics: scalars on the device, no gradient."""

    loss: Tensor
    metrics: dict[str, Tensor]


class ContrastiveLoss(nn.Module):
    """Pull each query to its positives and push it from its negatives (eq. 4, 6, 8-10). The defaults are PSM's.

    L = soft_weight * L_soft + hard_weight * L_hard: L_soft has the positives and negatives given here, L_hard (eq. 4)
    the key alone against both views of the other images. Holds no state; the bank is passed in and only read.

    Args:
        positives: positive rule: a name (``view``, ``nn``, ``knn``), settings or a ``PositiveRule``.
        negatives: negative source: ``views``, ``positives``, ``queries``, ``bank``, ``mochi`` or a ``NegativeSource``.
        sampler: which negatives are kept: ``pnsm``, ``none`` or a ``NegativeSampler``.
        weighting: what negatives weigh: ``sum``, ``debiased``, ``hard``, ``bayesian`` or a ``NegativeWeighting``.
        objective: ``contrastive``, ``decoupled``, ``byol`` or an ``Objective``.
        temperature: t, what similarities are divided by.
        soft_weight: weight of L_soft.
        hard_weight: lambda, weight of L_hard (eq. 7).
        allow_self: let a query meet stale copies of its own image in the bank.
        detach_keys: keys carry no gradient, as with a target network or a predictor.
        weight_sum: scale the loss so that the weights of a query's positives in both terms sum to this, in the mean
            over the batch; 0: as they are.
    """

    def __init__(
        self,
        positives: Any = "knn",
        negatives: Any = "positives",
        sampler: Any = "pnsm",
        weighting: Any = "sum",
        objective: Any = "contrastive",
        temperature: float = 0.5,
        soft_weight: float = 1.0,
        hard_weight: float = 1.0,
        allow_self: bool = False,
        detach_keys: bool = True,
        weight_sum: float = 0.0,
    ):
        super().__init__()
        self.positives: PositiveRule = POSITIVES.build(positives)
        self.negatives: NegativeSource = NEGATIVES.build(negatives)
        self.sampler: NegativeSampler = SAMPLERS.build(sampler)
        self.weighting: NegativeWeighting = WEIGHTINGS.build(weighting)
        self.objective: Objective = OBJECTIVES.build(objective)
        if isinstance(self.objective, ProjectionObjective):
            raise ValueError(
                f"objective {self.objective.part_name!r} compares projections and mines nothing: use psm.method_loss."
            )
        self.temperature, self.soft_weight, self.hard_weight = temperature, soft_weight, hard_weight
        self.allow_self, self.detach_keys, self.weight_sum = allow_self, detach_keys, weight_sum

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        projection: Tensor | None = None,
        query_view_key: Tensor | None = None,
        bank: MemoryBank | None = None,
        ids: Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> LossOutput:
        """Mean over the queries of the loss of one direction.

        Args:
            query: (N, D) predictions (or projections) of one view, unit norm as all vectors here.
            key: (N, D) target projections of the other view.
            projection: (N, D) online projections of the query's view, which weigh mined positives; None: the queries.
            query_view_key: (N, D) the key network's projections of the query's view, negatives of L_hard.
            bank: what positives or negatives are mined from.
            ids: (N,) ids of the images, which keep a query from meeting its own image in the bank.
            generator: source of the draws of PNSM and MoCHi.
        """
        batch = MiningBatch(
            query, key, query if projection is None else projection, query_view_key, ids, bank, generator
        )
        if not torch.compiler.is_compiling():
            check_batch(batch)
        return self.on_batch(batch)

    def on_batch(self, batch: MiningBatch) -> LossOutput:
        """The same for a batch that is known to be sound."""
        batch = batch._replace(allow_self=self.allow_self)
        if self.detach_keys:
            other = batch.query_view_key
            batch = batch._replace(key=batch.key.detach(), query_view_key=None if other is None else other.detach())
        terms: list[tuple[float, LossOutput]] = []
        metrics: dict[str, Tensor] = {}
        if self.soft_weight:
            soft = self._term(batch, self.positives, self.negatives)
            terms.append((self.soft_weight, soft))
            metrics |= {name: soft.metrics[name] for name in self.positives.metric_names}
        if self.hard_weight:
            terms.append((self.hard_weight, self._term(batch, ViewPositives(), ViewNegatives())))
        loss = torch.stack([weight * term.loss for weight, term in terms]).sum()
        if self.objective.uses_negatives:
            metrics["chance"] = torch.stack([weight * term.metrics["chance"] for weight, term in terms]).sum()
            metrics["negatives_kept"] = torch.stack([term.metrics["negatives_kept"] for _, term in terms]).mean()
        if self.weight_sum:
            scale = self.weight_sum / torch.stack([weight * term.metrics["weight"] for weight, term in terms]).sum()
            loss = scale * loss
            metrics |= {name: scale * metrics[name] for name in ("chance",) if name in metrics}
        if self.needs_bank and batch.bank is not None:
            fill = batch.bank.fill / batch.bank.size
            metrics["bank_fill"] = torch.full((), fill, dtype=torch.float32, device=loss.device)
        return LossOutput(loss, metrics)

    @property
    def needs_bank(self) -> bool:
        """True if anything is mined from the bank."""
        return self.soft_weight > 0 and (self.positives.num_mined > 0 or self.negatives.needs_bank)

    @property
    def metric_names(self) -> tuple[str, ...]:
        """Names of the metrics that the loss comes with."""
        mined = self.positives.metric_names if self.soft_weight else ()
        contrast = ("chance", "negatives_kept") if self.objective.uses_negatives else ()
        return (*mined, *contrast, *(("bank_fill",) if self.needs_bank else ()))

    def _term(self, batch: MiningBatch, rule: PositiveRule, source: NegativeSource) -> LossOutput:
        """Mean loss of one term, anchors in chunks of bounded memory."""
        positives = rule(batch)
        anchors, targets = source.anchors(batch, positives)
        term = _Term(self, positives, source(batch, positives), batch.draws or as_draws(batch.generator))
        candidates, own = term.columns(anchors), batch.processes.rows(len(anchors))
        term.draws.start(len(anchors), anchors_at_once(candidates, anchors.device), term.draws_per_anchor)
        total, sums = sum_over_anchors(term, candidates, (anchors, targets), term.candidates.tensors, own)
        term.draws.finish()
        if batch.processes is not ONE_PROCESS:
            total, *rest = batch.processes.sum(torch.stack([total, *sums.to(total.dtype)]))
            sums = torch.stack(rest).detach()
        metrics = dict(positives.metrics)
        if self.weight_sum:
            metrics["weight"] = positives.weights.sum(1).mean()
        if self.objective.uses_negatives:
            chance, kept, allowed = sums / len(anchors)
            metrics |= {"chance": chance, "negatives_kept": kept / allowed.clamp(min=1)}
        return LossOutput(total / len(anchors), metrics)


@dataclass(frozen=True)
class _Term:
    """The loss of a slice of anchors."""

    loss: ContrastiveLoss
    positives: Positives
    candidates: Candidates
    draws: Draws

    @property
    def draws_per_anchor(self) -> int:
        """Numbers that are drawn for each anchor."""
        if not self.loss.objective.uses_negatives or self._constant_rows() is not None:
            return 0
        pairs = 0 if self.loss.sampler.keeps_all else self.loss.sampler.draws_per_pair * self.candidates.columns
        return self.candidates.draws_per_anchor + pairs

    def __call__(self, rows: slice, anchor: Tensor, target: Tensor, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        """Summed loss () of the anchors (A, D) with targets (A, P, D), and sums of chance, kept and allowed (3,)."""
        objective = self.loss.objective
        temperature = self.loss.temperature if objective.uses_negatives else 1.0
        # Over the temperature before the products: dividing the products would be a pass over all pairs.
        scaled = anchor if temperature == 1 else anchor / temperature
        self.draws.seek(rows)
        anchors = Anchors(rows, anchor, scaled, temperature, self.draws)
        logits = torch.einsum("nd,npd->np", anchors.scaled, target)
        weights, mask = self.positives.weights[rows], self.positives.mask[rows]
        if not objective.uses_negatives:
            none = logits.new_full((len(anchor),), -torch.inf)
            return objective(logits, weights, mask, none).sum(), none.new_zeros(3)
        constant = self._constant_rows()
        if constant is not None:
            log_neg = ops.logsumexp_similarity(anchors.scaled, constant)
            every = torch.full_like(log_neg, len(constant))
            return objective(logits, weights, mask, log_neg).sum(), self._sums(weights, mask, every, every)
        positive, weighting = logits[:, 0], self.loss.weighting
        negatives = self.candidates.logits(anchors, *tensors)
        keep = self._keep(anchors, negatives, positive)
        count = negatives.similarity.shape[1]
        kept, allowed = (torch.full_like(positive, count) if x is None else x.sum(1) for x in (keep, negatives.allowed))
        if weighting.is_sum and anchor.device.type != "cpu" and isinstance(objective, Contrastive):
            losses = joined_contrastive_loss(logits, weights, mask, negatives.similarity, keep)
        else:
            log_neg = weighting(negatives.similarity, keep, positive, anchors.temperature)
            losses = objective(logits, weights, mask, log_neg)
        return losses.sum(), self._sums(weights, mask, kept, allowed)

    def _keep(self, anchors: Anchors, negatives: Negatives, positive: Tensor) -> Tensor | None:
        """Mask (A, M) of the negatives that count; None: all."""
        sampler = self.loss.sampler
        if sampler.keeps_all:
            return negatives.allowed if self.loss.weighting.is_sum else negatives.mask
        similarity, reference = (x.detach() * anchors.temperature for x in (negatives.similarity, positive))
        return negatives.mask & sampler.keep(similarity, reference, self.draws)

    @torch.no_grad()
    def _sums(self, weights: Tensor, mask: Tensor, kept: Tensor, allowed: Tensor) -> Tensor:
        """Sums (3,) over the anchors of the loss of guessing, and of their kept (A,) and allowed (A,) negatives."""
        in_denominator = self.loss.objective.positives_in_denominator
        counted = mask.sum(1) + kept if in_denominator else kept.clamp(min=1)
        chance = weights.sum(1) * counted.to(weights.dtype).log()
        return torch.stack([x.sum().to(chance.dtype) for x in (chance, kept, allowed)])

    def _constant_rows(self) -> Tensor | None:
        """Rows (M, D) that are summed over for every anchor alike, without a matrix of pairs, if that is possible."""
        plain = self.loss.weighting.is_sum and self.loss.sampler.keeps_all
        return self.candidates.constant_rows() if plain else None

    def columns(self, anchors: Tensor) -> int:
        """How many similarities of an anchor are held at once."""
        if not self.loss.objective.uses_negatives:
            return 0
        rows = self._constant_rows()
        # The kernel holds no matrix of products.
        bounded = rows is not None and ops.has_kernel(ops.logsumexp_similarity, anchors, rows)
        return 0 if bounded else self.candidates.count


def check_batch(batch: MiningBatch) -> None:
    """Refuse vectors of other shapes or that are not of unit norm; the norm is looked at on CPUs only, where it is
    cheap (on an accelerator it would wait for the device)."""
    for name in ("query", "key", "projection", "query_view_key"):
        vectors = getattr(batch, name)
        if vectors is None:
            continue
        if vectors.ndim != 2 or vectors.shape != batch.query.shape:
            raise ValueError(
                f"{name} has the shape {tuple(vectors.shape)}, and query {tuple(batch.query.shape)}: give (N, D) each."
            )
        if vectors.device.type == "cpu" and len(vectors):
            norm = vectors.detach().float().norm(dim=1)
            if not bool(((norm - 1).abs() < NORM_TOLERANCE).all()):
                raise ValueError(
                    f"{name} has vectors of norm {norm.min():.3g} to {norm.max():.3g}: normalize them to unit norm, "
                    "for example by torch.nn.functional.normalize(x, dim=1)."
                )
    if batch.ids is not None and batch.ids.shape != batch.query.shape[:1]:
        raise ValueError(
            f"ids have the shape {tuple(batch.ids.shape)}: give one for each of {len(batch.query)} queries."
        )
