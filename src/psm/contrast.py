"""A method's loss for one directed pair: positives and negatives are mined, then contrasted."""

from typing import NamedTuple

import torch
from torch import Tensor

from psm.bank import Bank
from psm.methods import Composition
from psm.negatives import log_mass, mine_negatives, of_other_images
from psm.objectives import contrastive
from psm.positives import Positives, key_alone, soft_neighbours
from psm.topology import Pair


class Outcome(NamedTuple):
    """The loss (), and what is worth knowing of how it came about: scalars on the device, no gradient."""

    loss: Tensor
    facts: dict[str, Tensor]


def contrast(
    pair: Pair,
    composition: Composition,
    bank: Bank | None = None,
    ids: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Outcome:
    """L = soft * L_soft + hard * L_hard (eq. 7), the mean over the queries.

    ``ids`` (N,) of the pictures keep a query from mining a stale copy of its own picture; ``generator`` decides
    PNSM's draws. The bank is only read.
    """
    loss = composition.loss
    parts, facts = [], {}
    if loss.soft:
        positives, found = _positives(pair, composition, bank, ids)
        parts.append((loss.soft, _term(pair.query, positives, positives.vectors, composition, generator)))
        facts |= found
    if loss.hard:
        both_views = torch.stack([pair.key, pair.other], 1)
        parts.append((loss.hard, _term(pair.query, key_alone(pair.key), both_views, composition, generator)))
    total = sum(weight * outcome.loss for weight, outcome in parts)
    facts["chance"] = sum(weight * outcome.facts["chance"] for weight, outcome in parts)
    facts["negatives_kept"] = torch.stack([outcome.facts["negatives_kept"] for _, outcome in parts]).mean()
    return Outcome(total, facts)


def _positives(
    pair: Pair, composition: Composition, bank: Bank | None, ids: Tensor | None
) -> tuple[Positives, dict[str, Tensor]]:
    if not composition.mines or bank is None:
        return key_alone(pair.key), {}
    wanted = composition.positives
    mined = bank.nearest(pair.key, wanted.k, own=None if wanted.own else ids)
    found = mined.found.to(mined.similarity.dtype)
    facts = {
        "mined_similarity": mined.similarity.mean(1).sum() / found.sum().clamp(min=1),
        "mined_share": found.mean(),
        "bank_fill": bank.fill / bank.size,
    }
    return soft_neighbours(pair.projection, pair.key, mined, wanted.weighting), facts


def _term(
    query: Tensor,
    positives: Positives,
    candidates: Tensor,
    composition: Composition,
    generator: torch.Generator | None,
) -> Outcome:
    """One contrastive term. ``candidates`` (N, C, D): vectors of each image, its positives first; those of the other
    images are a query's negatives."""
    count, each = candidates.shape[:2]
    similarity = (query @ candidates.flatten(0, 1).T).unflatten(1, (count, each))
    own = similarity.diagonal(dim1=0, dim2=1).T[:, : positives.present.shape[1]]
    absent = positives.present.new_ones(count, each - positives.present.shape[1])
    negatives = of_other_images(similarity, torch.cat([positives.present, absent], 1))
    keep = negatives.allowed
    if composition.negatives.pnsm:
        keep = keep & mine_negatives(
            negatives.similarity.detach(), own[:, 0].detach(), composition.negatives.a, generator
        )
    temperature = composition.loss.temperature
    losses = contrastive(
        own / temperature,
        positives.weights,
        positives.present,
        log_mass(negatives.similarity / temperature, keep),
    )
    with torch.no_grad():
        candidates_left = (positives.present.sum(1) + keep.sum(1)).to(losses.dtype)
        chance = (positives.weights.sum(1) * candidates_left.log()).mean()
        kept = keep.sum() / negatives.allowed.sum().clamp(min=1)
    return Outcome(losses.mean(), {"chance": chance, "negatives_kept": kept})
