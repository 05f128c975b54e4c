"""A method's loss for one directed pair: positives and negatives are mined, then contrasted."""

from typing import NamedTuple

import torch
from torch import Tensor

from psm import masses
from psm.bank import Bank
from psm.methods import Composition
from psm.negatives import Negatives, mine_negatives, mixed, of_other_images, of_the_bank
from psm.objectives import contrastive, regression, variance_covariance
from psm.positives import Positives, key_alone, nearest, soft_neighbours
from psm.topology import Embeddings, Pair, pairs


class Outcome(NamedTuple):
    """The loss (), and what is worth knowing of how it came about: scalars on the device, no gradient."""

    loss: Tensor
    facts: dict[str, Tensor]


def fact_names(composition: Composition) -> tuple[str, ...]:
    """The facts that a method's outcome comes with."""
    contrasts = ("chance", "negatives_kept") if composition.loss.objective == "contrastive" else ()
    mining = ("mined_similarity", "mined_share") if composition.mines else ()
    return (*contrasts, *mining, *(("bank_fill",) if composition.needs_bank else ()))


def loss_of(
    embeddings: Embeddings,
    composition: Composition,
    bank: Bank | None = None,
    ids: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Outcome:
    """The loss of a batch: the mean over its directed pairs."""
    loss = composition.loss
    if loss.objective == "variance-covariance":
        z1, z2 = (x.float() if x.dtype in (torch.bfloat16, torch.float16) else x for x in embeddings.projection)
        return Outcome(variance_covariance(z1, z2, loss.invariance, loss.variance, loss.covariance), {})
    outcomes = [contrast(pair, composition, bank, ids, generator) for pair in pairs(embeddings, loss.symmetric)]
    facts = {name: torch.stack([o.facts[name] for o in outcomes]).mean() for name in outcomes[0].facts}
    return Outcome(torch.stack([outcome.loss for outcome in outcomes]).mean(), facts)


def contrast(
    pair: Pair,
    composition: Composition,
    bank: Bank | None = None,
    ids: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Outcome:
    """L = soft * (the method's own term) + hard * L_hard (eq. 7), the mean over the queries.

    ``ids`` (N,) of the pictures keep a query from meeting a stale copy of its own picture in the bank; ``generator``
    decides the draws of PNSM and of mixing. The bank is only read.
    """
    loss = composition.loss
    own = None if composition.bank.own else ids
    parts, facts = [], {}

    def term(positives: Positives, source: str) -> Outcome:
        return _term(pair, positives, source, composition, bank, own, generator)

    if loss.soft:
        positives, facts = _positives(pair, composition, bank, own)
        parts.append((loss.soft, term(positives, composition.negatives.source)))
    if loss.hard:
        parts.append((loss.hard, term(key_alone(pair.key), "views")))
    total = sum(weight * outcome.loss for weight, outcome in parts)
    if loss.objective == "contrastive":
        facts["chance"] = sum(weight * outcome.facts["chance"] for weight, outcome in parts)
        facts["negatives_kept"] = torch.stack([outcome.facts["negatives_kept"] for _, outcome in parts]).mean()
    if composition.needs_bank and bank is not None:
        facts["bank_fill"] = bank.fill.float() / bank.size
    return Outcome(total, facts)


def _positives(
    pair: Pair, composition: Composition, bank: Bank | None, own: Tensor | None
) -> tuple[Positives, dict[str, Tensor]]:
    wanted = composition.positives
    if not composition.mines or bank is None:
        return key_alone(pair.key), {}
    mined = bank.nearest(pair.key.detach(), composition.mined, own)
    found = mined.found.to(mined.similarity.dtype)
    facts = {
        "mined_similarity": mined.similarity.mean(1).sum() / found.sum().clamp(min=1),
        "mined_share": found.mean(),
    }
    if wanted.rule == "nearest":
        return nearest(pair.key, mined), facts
    return soft_neighbours(pair.projection, pair.key, mined, wanted.weighting), facts


def _term(
    pair: Pair,
    positives: Positives,
    source: str,
    composition: Composition,
    bank: Bank | None,
    own: Tensor | None,
    generator: torch.Generator | None,
) -> Outcome:
    """One term: each anchor is pulled to its positives and pushed from the negatives of that source."""
    # The softmax runs over keys for each query; in NNCLR over the queries for each positive.
    anchor, pulled = pair.query, positives.vectors
    if source == "queries":
        anchor, pulled = pulled[:, 0], pair.query[:, None]
    similarity = torch.einsum("nd,npd->np", anchor, pulled)
    if composition.loss.objective == "regression":
        return Outcome(regression(similarity, positives.weights, positives.present).mean(), {})
    negatives = _negatives(pair, positives, anchor, source, composition, bank, own, generator)
    keep, mining, temperature = negatives.allowed, composition.negatives, composition.loss.temperature
    if mining.pnsm:
        keep = keep & mine_negatives(negatives.similarity.detach(), similarity[:, 0].detach(), mining.a, generator)
    logits = similarity / temperature
    log_mass = _log_mass(negatives.similarity / temperature, keep, logits[:, 0], composition)
    losses = contrastive(logits, positives.weights, positives.present, log_mass)
    with torch.no_grad():
        candidates_left = (positives.present.sum(1) + keep.sum(1)).to(losses.dtype)
        chance = (positives.weights.sum(1) * candidates_left.log()).mean()
        kept = keep.sum() / negatives.allowed.sum().clamp(min=1)
    return Outcome(losses.mean(), {"chance": chance, "negatives_kept": kept})


def _negatives(
    pair: Pair,
    positives: Positives,
    anchor: Tensor,
    source: str,
    composition: Composition,
    bank: Bank | None,
    own: Tensor | None,
    generator: torch.Generator | None,
) -> Negatives:
    if source == "bank":
        negatives = of_the_bank(anchor, bank, own)
        mining = composition.negatives
        if not mining.mixed + mining.mixed_query:
            return negatives
        return mixed(anchor, bank, negatives, mining.hardest, mining.mixed, mining.mixed_query, generator)
    candidates, present = {
        "views": lambda: (torch.stack([pair.key, pair.other], 1), None),
        "positives": lambda: (positives.vectors, positives.present),
        "queries": lambda: (pair.query[:, None], None),
    }[source]()
    count, each = candidates.shape[:2]
    similarity = (anchor @ candidates.flatten(0, 1).T).unflatten(1, (count, each))
    return of_other_images(similarity, positives.present.new_ones(count, each) if present is None else present)


def _log_mass(logits: Tensor, keep: Tensor, positive: Tensor, composition: Composition) -> Tensor:
    wanted, temperature = composition.negatives, composition.loss.temperature
    if wanted.mass == "debiased":
        return masses.debiased(logits, keep, positive, temperature, wanted.tau)
    if wanted.mass == "hard":
        return masses.hard(logits, keep, positive, temperature, wanted.tau, wanted.beta)
    if wanted.mass == "bayesian":
        return masses.bayesian(logits, keep, wanted.tau, wanted.alpha, wanted.beta)
    return masses.total(logits, keep)
