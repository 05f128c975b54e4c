"""MoCHi: synthetic negatives mixed from each query's hardest bank rows."""

import torch
from torch import Tensor

from psm.mining.draws import Draws, GeneratorDraws
from psm.mining.memory_bank import MemoryBank

DOT_ELEMENTS = (2**24, 2**19)  # elements of bank rows multiplied at a time: accelerator, CPU


def mix_negatives(
    query: Tensor,
    bank: MemoryBank,
    similarity: Tensor,
    mask: Tensor,
    num_hard: int,
    num_mix: int,
    num_mix_query: int,
    draws: Draws | torch.Generator | None = None,
) -> tuple[Tensor, Tensor]:
    """Similarities of the bank's rows and of synthetic negatives, and which of them are negatives.

    ``num_mix`` are normalize(x n_i + (1 - x) n_j) with x uniform in (0, 1), and ``num_mix_query`` are
    normalize(y q + (1 - y) n_j) with y uniform in (0, 0.5). No gradient flows through a synthetic vector h: its
    similarity is s(q, h) with h held fixed, which needs only the similarities of its parts and its norm.

    Args:
        query: (N, D), unit norm.
        bank: of M filled rows.
        similarity: (N, M) of queries and rows.
        mask: (N, M) which rows are negatives of the query.
        num_hard: how many of a query's hardest rows are mixed.
        num_mix: synthetic negatives from pairs of them.
        num_mix_query: synthetic negatives from one of them and the query.
        draws: source of the draws.

    Returns:
        (N, M + num_mix + num_mix_query) similarities and mask.
    """
    source = _whole(draws, len(query))
    if not similarity.shape[1]:
        return similarity, mask
    with torch.no_grad():
        best, places = similarity.masked_fill(~mask, -torch.inf).topk(min(num_hard, similarity.shape[1]), dim=1)
        usable = best > -torch.inf

    def uniform(number: int) -> Tensor:
        return source.uniform(number, query.device)

    def draw_rows(number: int) -> Tensor:
        """Places in the bank (N, number), uniform over the usable ones of the hardest."""
        chosen = (uniform(number) * usable.sum(1, keepdim=True)).long().clamp(max=places.shape[1] - 1)
        return places.gather(1, chosen)

    first, second, third = draw_rows(num_mix), draw_rows(num_mix), draw_rows(num_mix_query)
    x, y = uniform(num_mix).to(query.dtype), 0.5 * uniform(num_mix_query).to(query.dtype)
    with torch.no_grad():
        norm = _mixed_norm(x, _dot_rows(bank.rows, first, second).to(query.dtype))
        norm_query = _mixed_norm(y, similarity.gather(1, third))
    mixed = x * similarity.gather(1, first) + (1 - x) * similarity.gather(1, second)
    mixed_query = y * (query * query.detach()).sum(1, keepdim=True) + (1 - y) * similarity.gather(1, third)
    some = usable.any(1, keepdim=True).expand(-1, num_mix + num_mix_query)
    return torch.cat([similarity, mixed / norm, mixed_query / norm_query], 1), torch.cat([mask, some], 1)


def _whole(draws: Draws | torch.Generator | None, count: int) -> Draws:
    """Draws that stand at the queries; of a generator, for all of them."""
    if draws is not None and not isinstance(draws, torch.Generator):
        return draws
    whole = GeneratorDraws(draws)
    whole.start(count, count, 0)
    whole.seek(slice(0, count))
    return whole


def _mixed_norm(x: Tensor, dot: Tensor) -> Tensor:
    """|x a + (1 - x) b| for unit vectors with the dot product a . b."""
    return (x.square() + (1 - x).square() + 2 * x * (1 - x) * dot).clamp(min=1e-12).sqrt()


def _dot_rows(rows: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """rows[first] . rows[second] for places (N, S), in bounded memory.

    On a CPU as many at a time as its cache holds, which is three times as fast as all at once.
    """
    pairs = max(1, DOT_ELEMENTS[rows.device.type == "cpu"] // rows.shape[1])
    parts = [
        rows.index_select(0, left).mul_(rows.index_select(0, right)).sum(1)
        for left, right in zip(first.flatten().split(pairs), second.flatten().split(pairs), strict=True)
    ]
    return torch.cat(parts).view_as(first)
