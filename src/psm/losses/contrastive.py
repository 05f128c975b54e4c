"""The loss of one direction, from queries, keys and a memory bank, put together from open parts.

On accelerators and for compilers all directions of a batch are one batch. Where the loss is made of plain sums over the
batch's own candidates, its terms come from one product besides (``psm.losses.at_once``).
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from psm.config.parts import Part
from psm.losses.at_once import TermsAtOnce, holds_targets
from psm.losses.chunked import anchors_at_once, sum_over_anchors
from psm.losses.negative_weighting import WEIGHTINGS, NegativeWeighting, Sum
from psm.losses.objectives import OBJECTIVES, Contrastive, Objective, ProjectionObjective
from psm.losses.terms import Term, TermLoss, mine_term
from psm.mining.batch import MiningBatch
from psm.mining.draws import as_draws
from psm.mining.memory_bank import MemoryBank
from psm.mining.negatives import NEGATIVES, NegativeSource, ViewNegatives
from psm.mining.pnsm import PNSM, SAMPLERS, KeepAll, NegativeSampler
from psm.mining.positives import POSITIVES, PositiveRule, ViewPositives
from psm.mining.processes import ONE_PROCESS
from psm.utils.devices import prefers_few_kernels

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
        parts: tuple[Part, ...] = (self.positives, self.negatives, self.sampler, self.weighting, self.objective)
        self._builtin = all(part.builtin for part in parts)
        plain = type(self.weighting) is Sum and type(self.objective) is Contrastive
        self.is_plain_sum = plain and type(self.sampler) in (KeepAll, PNSM)

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
        terms = self._mine(batch)
        at_once = self.is_plain_sum and prefers_few_kernels(batch.query.device) and holds_targets(terms)
        loss, contrast = self._at_once(batch, terms) if at_once else self._one_by_one(batch, terms)
        mined = self.positives.metric_names if self.soft_weight else ()
        metrics = {**{name: terms[0].positives.metrics[name] for name in mined}, **contrast}
        if self.weight_sum:
            weights = [term.weight * term.positives.weights.sum(1).mean() for term in terms]
            scale = self.weight_sum / torch.stack(weights).sum()
            loss = scale * loss
            metrics |= {name: scale * metrics[name] for name in ("chance",) if name in metrics}
        if self.needs_bank and batch.bank is not None:
            metrics["bank_fill"] = batch.bank.fill_share
        return LossOutput(loss, metrics)

    def joins_directions(self, one_search: bool = False) -> bool:
        """True if all directions can be one batch; ``one_search``: all of them are given the same rows.

        Parts of others may look beyond the row of an anchor; ``weight_sum`` is that of one direction.
        """
        return self._builtin and (not self.weight_sum or self.positives.equal_sums(one_search))

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

    def _mine(self, batch: MiningBatch) -> list[Term]:
        """L_soft and L_hard, as far as they have a weight."""
        parts: list[tuple[float, PositiveRule, NegativeSource]] = [
            (self.soft_weight, self.positives, self.negatives),
            (self.hard_weight, ViewPositives(), ViewNegatives()),
        ]
        return [mine_term(batch, *given) for given in parts if given[0]]

    def _one_by_one(self, batch: MiningBatch, terms: list[Term]) -> LossOutput:
        """The weighted sum of the terms."""
        outputs = [self._term(batch, term) for term in terms]
        loss = torch.stack([term.weight * output.loss for term, output in zip(terms, outputs, strict=True)]).sum()
        if not self.objective.uses_negatives:
            return LossOutput(loss, {})
        chances = [term.weight * output.metrics["chance"] for term, output in zip(terms, outputs, strict=True)]
        kept = [output.metrics["negatives_kept"] for output in outputs]
        return LossOutput(loss, {"chance": torch.stack(chances).sum(), "negatives_kept": torch.stack(kept).mean()})

    def _term(self, batch: MiningBatch, term: Term) -> LossOutput:
        """Mean loss of one term."""
        function = TermLoss(
            self.temperature, self.sampler, self.weighting, self.objective, term.positives, term.candidates,
            batch.draws or as_draws(batch.generator), len(batch.directions),
        )  # fmt: skip
        total, sums = self._sum(batch, function, (term.anchors, term.targets), term.candidates.tensors)
        if not self.objective.uses_negatives:
            return LossOutput(total, {})
        chance, kept, allowed = sums
        return LossOutput(total, {"chance": chance, "negatives_kept": kept / allowed.clamp(min=1)})

    def _at_once(self, batch: MiningBatch, terms: list[Term]) -> LossOutput:
        """The same from one product."""
        draws = batch.draws or as_draws(batch.generator)
        function = TermsAtOnce.join(terms, self.temperature, self.sampler, draws, len(batch.directions))
        total, (chance, kept, allowed) = self._sum(batch, function, (terms[0].anchors,), (function.vectors,))
        return LossOutput(total, {"chance": chance.sum(), "negatives_kept": (kept / allowed.clamp(min=1)).mean()})

    def _sum(
        self,
        batch: MiningBatch,
        function: TermLoss | TermsAtOnce,
        per_anchor: tuple[Tensor, ...],
        shared: tuple[Tensor, ...],
    ) -> tuple[Tensor, Tensor]:
        """A function's mean over the anchors, in chunks of bounded memory, and that of what it gives beside."""
        count, groups = len(per_anchor[0]), len(batch.directions)
        candidates, own = function.columns(per_anchor[0]), batch.processes.rows(count // groups)
        at_once = anchors_at_once(groups * candidates, per_anchor[0].device)
        function.draws.start(count // groups, at_once, function.draws_per_anchor, groups)
        total, sums = sum_over_anchors(function, candidates, per_anchor, shared, own, groups)
        function.draws.finish()
        if batch.processes is not ONE_PROCESS:
            joined = batch.processes.sum(torch.cat([total[None], sums.flatten().to(total.dtype)]))
            total, sums = joined[0], joined[1:].detach().view_as(sums)
        return total / count, sums / count


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
