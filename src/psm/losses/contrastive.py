"""A method's loss for one directed pair: positives and negatives are mined, then contrasted."""

from typing import NamedTuple

import torch
from torch import Tensor

from psm.kernels import similarity as products
from psm.losses import negative_weighting as masses
from psm.losses.chunked import sum_over_anchors
from psm.losses.functional import contrastive, logsumexp_of_products, regression, variance_covariance
from psm.methods.registry import Composition
from psm.mining.memory_bank import MemoryBank
from psm.mining.negatives import Negatives, mine_negatives, mixed, of_other_images, of_the_bank
from psm.mining.positives import Positives, key_alone, nearest, soft_neighbors
from psm.models.siamese import Embeddings, Pair, pairs


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
    bank: MemoryBank | None = None,
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
    bank: MemoryBank | None = None,
    ids: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Outcome:
    """L = soft * (the method's own term) + hard * L_hard (eq. 7), the mean over the queries.

    ``ids`` (N,) of the images keep a query from meeting a stale copy of its own image in the bank; ``generator``
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
        facts["bank_fill"] = torch.full((), bank.fill / bank.size, dtype=torch.float32, device=total.device)
    return Outcome(total, facts)


def _positives(
    pair: Pair, composition: Composition, bank: MemoryBank | None, own: Tensor | None
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
    return soft_neighbors(pair.projection, pair.key, mined, wanted.weighting), facts


def _term(
    pair: Pair,
    positives: Positives,
    source: str,
    composition: Composition,
    bank: MemoryBank | None,
    own: Tensor | None,
    generator: torch.Generator | None,
) -> Outcome:
    """One term: each anchor is pulled to its positives and pushed from the negatives of that source."""
    # The softmax runs over keys for each query; in NNCLR over the queries for each positive.
    anchors, pulled = pair.query, positives.vectors
    if source == "queries":
        anchors, pulled = pulled[:, 0], pair.query[:, None]
    if composition.loss.objective == "regression":
        similarity = torch.einsum("nd,npd->np", anchors, pulled)
        return Outcome(regression(similarity, positives.weights, positives.present).mean(), {})
    mining, temperature = composition.negatives, composition.loss.temperature
    candidates, present = _candidates(pair, positives, source)

    made = mining.mixed + mining.mixed_query
    plain_bank = source == "bank" and own is None and mining.mass == "sum" and not (mining.pnsm or made)

    def share(part: slice, anchor: Tensor, pulled: Tensor, *candidates: Tensor) -> tuple[Tensor, Tensor]:
        """Of some of the anchors: the sum of their losses, and what the facts are made of."""
        # Over the temperature before the products: to divide what comes of them would take a pass over all pairs.
        scaled = anchor / temperature
        logits = torch.einsum("nd,npd->np", scaled, pulled)
        weights, there = positives.weights[part], positives.present[part]
        if plain_bank:
            log_mass = logsumexp_of_products(scaled, bank.filled[0])
            kept = allowed = torch.full_like(log_mass, bank.fill)
        else:
            log_mass, kept, allowed = mined(part, anchor, scaled, logits[:, 0], *candidates)
        with torch.no_grad():
            chance = weights.sum(1) * (there.sum(1) + kept).to(weights.dtype).log()
            told = torch.stack([x.sum().to(chance.dtype) for x in (chance, kept, allowed)])
        return contrastive(logits, weights, there, log_mass).sum(), told

    def mined(part: slice, anchor: Tensor, scaled: Tensor, positive: Tensor, *candidates: Tensor) -> tuple[Tensor, ...]:
        """Of some of the anchors: the log of their negatives' mass, how many are kept and how many there are."""
        if source == "bank":
            whose = None if own is None else own[part]
            if made:
                rows = of_the_bank(anchor, bank, whose)
                both = mixed(anchor, bank, rows, mining.hardest, mining.mixed, mining.mixed_query, generator)
                negatives = Negatives(both.similarity / temperature, both.allowed)
            else:
                negatives = of_the_bank(scaled, bank, whose)
        else:
            negatives = of_other_images(scaled, *candidates, present, part.start)
        keep = negatives.allowed if mining.mass == "sum" else negatives.mask
        if mining.pnsm:
            similarities = (x.detach() * temperature for x in (negatives.similarity, positive))
            keep = negatives.mask & mine_negatives(*similarities, mining.a, generator)
        log_mass = _log_mass(negatives.similarity, keep, positive, composition)
        all_of_them = torch.full_like(log_mass, negatives.similarity.shape[1])
        kept, allowed = (all_of_them if x is None else x.sum(1) for x in (keep, negatives.allowed))
        return log_mass, kept, allowed

    if source == "bank":
        bounded = plain_bank and products.summable(anchors, bank.filled[0])  # which holds no matrix of pairs
        columns = 0 if bounded else bank.fill
    else:
        columns = candidates.shape[0] * candidates.shape[1]
    total, told = sum_over_anchors(share, columns, (anchors, pulled), () if source == "bank" else (candidates,))
    chance, kept, allowed = told / len(anchors)
    return Outcome(total / len(anchors), {"chance": chance, "negatives_kept": kept / allowed.clamp(min=1)})


def _candidates(pair: Pair, positives: Positives, source: str) -> tuple[Tensor, Tensor] | tuple[None, None]:
    """What each image of the batch offers the others as negatives, (N, C, D), and which of it exists, (N, C)."""
    if source == "bank":
        return None, None
    if source == "positives":
        return positives.vectors, positives.present
    candidates = pair.query[:, None] if source == "queries" else torch.stack([pair.key, pair.other], 1)
    return candidates, torch.ones(candidates.shape[:2], dtype=torch.bool, device=candidates.device)


def _log_mass(logits: Tensor, keep: Tensor | None, positive: Tensor, composition: Composition) -> Tensor:
    wanted, temperature = composition.negatives, composition.loss.temperature
    if wanted.mass == "debiased":
        return masses.debiased(logits, keep, positive, temperature, wanted.tau)
    if wanted.mass == "hard":
        return masses.hard(logits, keep, positive, temperature, wanted.tau, wanted.beta)
    if wanted.mass == "bayesian":
        return masses.bayesian(logits, keep, wanted.tau, wanted.alpha, wanted.beta)
    return masses.total(logits, keep)
