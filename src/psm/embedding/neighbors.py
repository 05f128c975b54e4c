"""The most similar rows of a matrix by cosine similarity: exact, in blocks, on memory-mapped rows too."""

from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

MAX_SIMILARITIES = 2**23  # held at a time
MAX_BLOCK = 2**22  # numbers of a block of rows, which is converted to float32


def inverse_norms(rows: np.ndarray) -> Tensor:
    """1 / length of each row (N,), float32; 0 for a row of zeros."""
    norms = torch.cat([block.norm(dim=1) for _, block in _blocks(rows, MAX_BLOCK)]) if len(rows) else torch.empty(0)
    return torch.where(norms > 0, 1 / norms, 0.0)


@torch.inference_mode()
def nearest_rows(
    rows: np.ndarray,
    queries: Tensor,
    k: int,
    scale: Tensor | None = None,
    exclude: Tensor | None = None,
    advance: Callable[[int], object] = lambda count: None,
) -> tuple[Tensor, Tensor]:
    """The k rows most similar to each query, most similar first.

    Args:
        rows: (N, D), float32 or float16, in memory or memory-mapped.
        queries: (Q, D), of any length.
        k: at most N, less one where rows are excluded.
        scale: ``inverse_norms(rows)``, where it is known.
        exclude: (Q,) a row that each query does not find: itself; -1 for none.
        advance: called with the number of queries after each group of them.

    Returns:
        Cosine similarities (Q, k) and row numbers (Q, k).
    """
    scale = inverse_norms(rows) if scale is None else scale
    queries = normalize(queries.float(), dim=1)
    found = []
    group = max(1, MAX_SIMILARITIES // max(1, min(len(rows), MAX_BLOCK // rows.shape[1])))
    for start in range(0, len(queries), group):
        some = slice(start, start + group)
        found.append(_nearest(rows, queries[some], k, scale, None if exclude is None else exclude[some]))
        advance(len(queries[some]))
    if not found:
        return torch.empty(0, k), torch.empty(0, k, dtype=torch.long)
    similarity, numbers = zip(*found, strict=True)
    return torch.cat(similarity), torch.cat(numbers)


def _nearest(rows: np.ndarray, queries: Tensor, k: int, scale: Tensor, exclude: Tensor | None) -> tuple[Tensor, Tensor]:
    """The search for few queries: the best of each block, merged with the best so far."""
    best = torch.empty(len(queries), 0)
    numbers = torch.empty(len(queries), 0, dtype=torch.long)
    for first, block in _blocks(rows, MAX_BLOCK):
        similarity = (queries @ block.T).mul_(scale[first : first + len(block)])
        if exclude is not None:
            here = ((exclude >= first) & (exclude < first + len(block))).nonzero()[:, 0]
            similarity[here, exclude[here] - first] = -torch.inf
        values, places = similarity.topk(min(k, len(block)), dim=1)
        best, numbers = torch.cat([best, values], 1), torch.cat([numbers, places + first], 1)
        best, kept = best.topk(min(k, best.shape[1]), dim=1)
        numbers = numbers.gather(1, kept)
    return best, numbers


def _blocks(rows: np.ndarray, most: int) -> Iterator[tuple[int, Tensor]]:
    """Blocks of rows as float32, of about ``most`` numbers each, with the number of their first row."""
    step = max(1, most // max(1, rows.shape[1]))
    for start in range(0, len(rows), step):
        yield start, torch.from_numpy(rows[start : start + step]).float()
