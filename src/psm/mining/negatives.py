"""Which vectors a query is pushed from, and which of them PNSM keeps."""

from typing import NamedTuple

import torch
from torch import Tensor

from psm.mining.memory_bank import MemoryBank, mask_same_image_

DOT_ELEMENTS = (2**24, 2**19)  # of bank rows multiplied at a time on an accelerator, on a CPU


class Negatives(NamedTuple):
    """The candidates of each query: their similarity to it (N, M) and which of them are its negatives (N, M).

    To the query as it was given: similarities of a query over the temperature are logits.
    """

    similarity: Tensor
    allowed: Tensor | None  # None: all of them

    @property
    def mask(self) -> Tensor:
        """Which of them are its negatives, spelled out."""
        return torch.ones_like(self.similarity, dtype=torch.bool) if self.allowed is None else self.allowed


def of_other_images(anchor: Tensor, candidates: Tensor, present: Tensor, first: int = 0) -> Negatives:
    """Candidates that belong to the batch's images: all but the anchor's own image's.

    ``anchor`` (A, D): the batch's anchors from the ``first`` on; ``candidates`` (N, C, D) of each image; ``present``
    (N, C): which of an image's candidates exist.
    """
    allowed = present.expand(len(anchor), -1, -1).clone()
    place = torch.arange(len(anchor), device=anchor.device)
    allowed[place, first + place] = False
    return Negatives(anchor @ candidates.flatten(0, 1).T, allowed.flatten(1))


@torch.no_grad()
def keep_probability(similarity: Tensor, positive_similarity: Tensor, a: float) -> Tensor:
    """PNSM, eq. 8: p = exp(-a (s(q, n) - s(q, key))^2) for similarities (N, M) and the positive's (N,)."""
    return (similarity - positive_similarity[:, None]).square_().mul_(-a).exp_()


@torch.no_grad()
def mine_negatives(
    similarity: Tensor, positive_similarity: Tensor, a: float, generator: torch.Generator | None = None
) -> Tensor:
    """PNSM, eq. 9: an independent Bernoulli draw for each (query, negative) decides whether it is kept, (N, M)."""
    probability = keep_probability(similarity, positive_similarity, a)
    # Always in single precision: in half, chances would be rounded coarsely.
    return (
        torch.rand(probability.shape, generator=generator, device=probability.device, dtype=torch.float32) < probability
    )


def of_the_bank(query: Tensor, bank: MemoryBank, own: Tensor | None = None) -> Negatives:
    """MoCo: the bank's filled rows, but for those with the queries' own ids (N,), if given."""
    rows, ids = bank.filled
    negatives = Negatives(query @ rows.to(query.dtype).T, None)
    return negatives if own is None else negatives._replace(allowed=mask_same_image_(negatives.mask, ids, own, False))


def mixed(
    query: Tensor,
    bank: MemoryBank,
    negatives: Negatives,
    hardest: int,
    pairs: int,
    with_query: int,
    generator: torch.Generator | None = None,
) -> Negatives:
    """MoCHi: the bank's negatives and synthetic ones made of each query's hardest.

    ``pairs`` of normalize(x n_i + (1 - x) n_j) with x uniform in (0, 1), and ``with_query`` of
    normalize(y q + (1 - y) n_j) with y uniform in (0, 0.5). No gradient flows through a synthetic vector h: its
    similarity is s(q, h) with h held fixed, which needs only the similarities of its parts and its length.
    """
    count, device = len(query), query.device
    if not bank.fill:
        return negatives
    with torch.no_grad():
        ranked = negatives.similarity.masked_fill(~negatives.mask, -torch.inf)
        best, places = ranked.topk(min(hardest, ranked.shape[1]), dim=1)
        usable = best > -torch.inf

    def draw(number: int) -> Tensor:
        """Places in the bank, (N, number), drawn evenly among the usable ones of the hardest."""
        chance = torch.rand((count, number), generator=generator, device=device)
        chosen = (chance * usable.sum(1, keepdim=True)).long().clamp(max=places.shape[1] - 1)
        return places.gather(1, chosen)

    def uniform(number: int) -> Tensor:
        return torch.rand((count, number), generator=generator, device=device).to(query.dtype)

    first, second, third = draw(pairs), draw(pairs), draw(with_query)
    x, y = uniform(pairs), 0.5 * uniform(with_query)
    with torch.no_grad():
        between = _dot_rows(bank.rows, first, second).to(query.dtype)
        length = (x.square() + (1 - x).square() + 2 * x * (1 - x) * between).clamp(min=1e-12).sqrt()
        to_third = negatives.similarity.gather(1, third)
        length_query = (y.square() + (1 - y).square() + 2 * y * (1 - y) * to_third).clamp(min=1e-12).sqrt()
    of_pairs = x * negatives.similarity.gather(1, first) + (1 - x) * negatives.similarity.gather(1, second)
    to_itself = (query * query.detach()).sum(1, keepdim=True)
    of_query = y * to_itself + (1 - y) * negatives.similarity.gather(1, third)
    similarity = torch.cat([negatives.similarity, of_pairs / length, of_query / length_query], 1)
    some = usable.any(1, keepdim=True).expand(-1, pairs + with_query)
    return Negatives(similarity, torch.cat([negatives.mask, some], 1))


def _dot_rows(rows: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """rows[first] . rows[second] for places (N, S), in bounded memory.

    On a CPU as many at a time as its cache holds, which is three times as fast as many.
    """
    pairs = max(1, DOT_ELEMENTS[rows.device.type == "cpu"] // rows.shape[1])
    parts = [
        rows.index_select(0, left).mul_(rows.index_select(0, right)).sum(1)
        for left, right in zip(first.flatten().split(pairs), second.flatten().split(pairs), strict=True)
    ]
    return torch.cat(parts).view_as(first)
