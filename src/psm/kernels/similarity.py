"""Products of queries with all rows of a bank, for x86 CPUs, of which only what is wanted is kept.

That is the k largest, by which positives are mined, or the sum of their exponentials, over which MoCo v2's negatives
are contrasted, with its gradient. torch writes the matrix of products for either, goes through it several times, and at
a few hundred queries and short rows leaves a third of the processor's speed unused (MKL with AVX2). Here a group of
queries stays in the cache while rows pass by as they lie, and what is wanted of a product is taken while it is there: a
search writes one product of twelve, a sum none, so that its memory does not grow with the bank. It is compiled
(``processor``). ``benchmarks/parts.py`` measures both beside torch's functions: at 256 queries and 16,384 rows they are
1.6 to 1.9 times as fast, 1.3 to 1.5 times at the least for which they are taken (two cores, AVX2).
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from psm.kernels.runtime import call, in_memory, lanes, room, structure

BLOCK = 12  # rows that have one maximum
GROUP = 128  # the most queries that rows pass by at a time: fewer read a bank more often
LEAST = 2**16  # products; below, calls weigh as much

Search = structure("Search", "rows queries ids own maxima values chosen places", "count inner columns group block k")
Sum = structure("Sum", "rows queries level total mean", "count inner columns group")


def searchable(queries: Tensor, rows: Tensor, k: int, *ids: Tensor) -> bool:
    """Whether a search is one for this way, and faster by it."""
    return bool(
        _apply_to(queries, rows)
        and 1 <= k <= len(rows) // (2 * lanes() * BLOCK)  # else more is looked at twice than once
        and all(int(x.min()) >= -(2**31) and int(x.max()) < 2**31 for x in ids)
    )


def summable(queries: Tensor, rows: Tensor) -> bool:
    """Whether a sum is one for this way, and faster by it."""
    return _apply_to(queries, rows) and rows.shape[1] % (2 * lanes()) == 0


def largest(queries: Tensor, rows: Tensor, k: int, ids: Tensor | None, own: Tensor | None) -> tuple[Tensor, Tensor]:
    """The k largest products (N, k) of queries (N, D) with rows (M, D), the largest first, and their places.

    Rows whose id (M,) is the query's ``own`` (N,) are passed over; what is then missing of k is -inf.
    """
    count, blocks = len(queries), -(-len(rows) // BLOCK)
    given = _given(queries, rows)
    columns = given["columns"]
    values, chosen, places = room(3, columns, k)
    if own is not None:
        given |= {"ids": _narrow(ids), "own": _narrow(pad(own, (0, columns - count)))}
    given |= {"maxima": room(blocks, columns), "block": BLOCK, "k": k}
    call("search", Search, values=values, chosen=chosen, places=places, **given)
    return values[:count], places[:count].view(torch.int32).long()


def log_sum_exp(queries: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """log of the sum over rows (M, D) of exp(q . r) for queries (N, D); its gradient, the rows' mean under softmax."""
    count = len(queries)
    given = _given(queries, rows)
    level, total = room(2, given["columns"])
    mean = room(given["columns"], rows.shape[1])
    call("sum", Sum, level=level, total=total, mean=mean, **given)
    return level[:count] + total[:count].log(), mean[:count].div_(total[:count, None])


def _apply_to(queries: Tensor, rows: Tensor) -> bool:
    return bool(
        lanes()
        and in_memory(queries, rows)
        and rows.is_contiguous()
        and queries.ndim == 2
        and queries.shape[1] == rows.shape[1]
        and len(queries) >= lanes() * max(2, torch.get_num_threads())  # a pair of vectors for every other thread
        and len(queries) * len(rows) >= max(LEAST, 1)
    )


def _given(queries: Tensor, rows: Tensor) -> dict[str, Tensor | int]:
    """Rows, queries as pairs of vectors lie, and sizes. Each thread has a group of queries if there are enough."""
    (count, inner), width = queries.shape, 2 * lanes()
    columns = _whole(count, width)
    packed = pad(queries, (0, 0, 0, columns - count)).view(-1, width, inner).transpose(1, 2).contiguous()
    group = min(GROUP, _whole(-(-columns // torch.get_num_threads()), width))
    return {"rows": rows, "queries": packed, "count": len(rows), "inner": inner, "columns": columns, "group": group}


def _whole(count: int, by: int) -> int:
    return -(-count // by) * by


def _narrow(ids: Tensor) -> Tensor:
    """Ids as 32 bits each, which pass as floats."""
    return ids.to(torch.int32).contiguous().view(torch.float32)
