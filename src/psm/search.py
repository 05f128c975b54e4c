"""The exact search in a bank, for x86 CPUs: similarities, a query's own picture passed over, and maxima in one.

torch's product of a few hundred queries with many short rows leaves a third of the processor's speed unused (MKL with
AVX2), and what comes of it is gone through again for its maxima and a query's own rows. Here rows are read as they lie,
all of that happens while a product is in registers, and it is compiled (``processor``). The k largest of a query are in
the k blocks of rows with the largest maxima. ``benchmarks/parts.py`` measures it beside torch's: 1.3 to 1.4 times as
fast at 256 queries and 16,384 rows, 1.2 times at the least for which it is taken (two cores, AVX2).
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from psm.processor import call, in_memory, lanes, room, structure

BLOCK = 96  # rows that have one maximum
LEAST = 2**16  # similarities; below, calls weigh as much as products

Pass = structure("Pass", "rows queries ids own similarity maxima", "count inner columns block")  # struct search


def apply_to(vectors: Tensor, rows: Tensor, k: int, *ids: Tensor) -> bool:
    """Whether such a search is one for this way, and faster by it."""
    return bool(
        lanes()
        and in_memory(vectors, rows)
        and rows.is_contiguous()
        and vectors.ndim == 2
        and vectors.shape[1] == rows.shape[1]
        and len(vectors) >= 2 * lanes()  # which are compared at a time
        and len(vectors) * len(rows) >= LEAST
        and 2 * k <= len(rows) // BLOCK
        and all(int(x.min()) >= -(2**31) and int(x.max()) < 2**31 for x in ids)
    )


def held(vectors: Tensor, rows: Tensor) -> int:
    """Floats that a search takes for its similarities."""
    return _whole(len(rows), BLOCK) * _whole(len(vectors), 2 * lanes())


def largest(
    vectors: Tensor, rows: Tensor, k: int, ids: Tensor | None, own: Tensor | None, memory: Tensor
) -> tuple[Tensor, Tensor]:
    """The k largest products (N, k) of vectors (N, D) with rows (M, D), and their places.

    Rows whose id (M,) is the vector's ``own`` (N,) count as -inf. ``memory`` has at least ``held`` floats.
    """
    count, width = len(vectors), 2 * lanes()
    columns, blocks = _whole(count, width), -(-len(rows) // BLOCK)
    queries = pad(vectors, (0, 0, 0, columns - count)).view(-1, width, vectors.shape[1]).transpose(1, 2).contiguous()
    similarity = memory[: blocks * BLOCK * columns].view(blocks, BLOCK, columns)
    similarity.flatten(0, 1)[len(rows) :] = -torch.inf
    maxima = room(blocks, columns)
    narrow = {} if own is None else {"ids": _narrow(ids), "own": _narrow(pad(own, (0, columns - count)))}
    sizes = {"count": len(rows), "inner": rows.shape[1], "columns": columns, "block": BLOCK}
    call("search", Pass, rows=rows, queries=queries, similarity=similarity, maxima=maxima, **narrow, **sizes)
    chosen = maxima[:, :count].T.topk(k, dim=1).indices
    candidates = similarity.permute(2, 0, 1)[torch.arange(count, device="cpu")[:, None], chosen].flatten(1)
    values, where = candidates.topk(k, dim=1)
    places = chosen.gather(1, where // BLOCK) * BLOCK + where % BLOCK
    return values, places.clamp_(max=len(rows) - 1)  # what is past the last row is as little as one's own


def _whole(count: int, by: int) -> int:
    return -(-count // by) * by


def _narrow(ids: Tensor) -> Tensor:
    """Ids as 32 bits each, which pass as floats."""
    return ids.to(torch.int32).contiguous().view(torch.float32)
