"""Reductions over the similarities of queries with all rows of a bank, without writing their matrix; for x86-64 CPUs.

Top-k, by which positives are mined, and log-sum-exp with its gradient, MoCo v2's sum over all negatives. PyTorch writes
the matrix of similarities for either, passes over it several times, and at a few hundred queries of low dimension
leaves a third of the CPU's speed unused (MKL, AVX2). Here a group of queries stays in the cache while the rows are read
in blocks, and similarities are reduced in registers: top-k writes one value per 12 rows, log-sum-exp none, so memory
does not grow with the bank. ``benchmarks/parts.py`` measures both beside PyTorch: 1.6 to 1.9 times as fast at 256
queries and 16,384 rows, 1.3 to 1.5 times at the smallest supported sizes (two cores, AVX2).
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from psm.kernels.runtime import empty, is_plain_float, launch, make_struct, simd_width

BLOCK = 12  # rows that have one maximum
MAX_GROUP = 128  # queries that stay in the cache: fewer read the bank more often
MIN_PAIRS = 2**16  # similarities; below, the overhead of a launch outweighs the gain

TopkArgs = make_struct(
    "TopkArgs",
    "rows queries ids exclude_ids block_max values top_blocks indices",
    "num_rows dim num_queries group block k",
)
LogSumExpArgs = make_struct("LogSumExpArgs", "rows queries max total mean", "num_rows dim num_queries group")


def supports_topk(
    queries: Tensor,
    rows: Tensor,
    k: int,
    ids: Tensor | None = None,
    exclude_ids: Tensor | None = None,
    buffer: Callable[[int], Tensor] | None = None,
    in_use: Tensor | None = None,
) -> bool:
    """True if the top-k search is supported and faster: few blocks are searched twice, ids fit in 32 bits."""
    width = simd_width()
    compared = () if ids is None or exclude_ids is None else (ids, exclude_ids)
    return bool(
        width
        and in_use is None
        and _supports(queries, rows, width)
        and 1 <= k <= len(rows) // (2 * width * BLOCK)
        and all(int(x.min()) >= -(2**31) and int(x.max()) < 2**31 for x in compared)
    )


def supports_logsumexp(queries: Tensor, rows: Tensor) -> bool:
    """True if the log-sum-exp is supported and faster: the dimension is a multiple of two vectors."""
    width = simd_width()
    return bool(width and _supports(queries, rows, width) and rows.shape[1] % (2 * width) == 0)


def topk_similarity(
    queries: Tensor,
    rows: Tensor,
    k: int,
    ids: Tensor | None = None,
    exclude_ids: Tensor | None = None,
    buffer: Callable[[int], Tensor] | None = None,
    in_use: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """``psm.ops.topk_similarity`` where all rows count; the buffer is not used."""
    count, blocks = len(queries), -(-len(rows) // BLOCK)
    given = _shared_args(queries, rows)
    num_queries = given["num_queries"]
    values, top_blocks, indices = empty(3, num_queries, k)
    if ids is not None and exclude_ids is not None:
        given |= {"ids": _as_int32(ids), "exclude_ids": _as_int32(pad(exclude_ids, (0, num_queries - count)))}
    given |= {"block_max": empty(blocks, num_queries), "block": BLOCK, "k": k}
    launch("topk_similarity", TopkArgs, values=values, top_blocks=top_blocks, indices=indices, **given)
    return values[:count], indices[:count].view(torch.int32).long()


def logsumexp_similarity(queries: Tensor, rows: Tensor) -> Tensor:
    """``psm.ops.logsumexp_similarity``."""
    return _LogSumExp.apply(queries, rows)


class _LogSumExp(torch.autograd.Function):
    """Log-sum-exp of similarities; the gradient of a query is the mean of the rows under the softmax."""

    @staticmethod
    def forward(ctx: Any, queries: Tensor, rows: Tensor) -> Tensor:
        result, mean = logsumexp_and_mean(queries, rows)
        ctx.save_for_backward(mean)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor, None]:
        return ctx.saved_tensors[0] * grad_out[:, None], None


def logsumexp_and_mean(queries: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Log-sum-exp (N,) of the similarities of queries (N, D) with rows (M, D), and the rows' softmax mean (N, D)."""
    count = len(queries)
    given = _shared_args(queries, rows)
    largest, total = empty(2, given["num_queries"])
    mean = empty(given["num_queries"], rows.shape[1])
    launch("logsumexp_similarity", LogSumExpArgs, max=largest, total=total, mean=mean, **given)
    return largest[:count] + total[:count].log(), mean[:count].div_(total[:count, None])


def _supports(queries: Tensor, rows: Tensor, width: int) -> bool:
    return bool(
        is_plain_float(queries, rows)
        and rows.is_contiguous()
        and queries.ndim == 2
        and queries.shape[1] == rows.shape[1]
        and len(queries) >= width * max(2, torch.get_num_threads())  # two vectors for every other thread
        and len(queries) * len(rows) >= max(MIN_PAIRS, 1)
    )


def _shared_args(queries: Tensor, rows: Tensor) -> dict[str, Any]:
    """Rows, packed queries and sizes. Each thread gets a group of queries if there are enough."""
    (count, dim), columns = queries.shape, 2 * (simd_width() or 0)
    num_queries = _round_up(count, columns)
    packed = pad(queries, (0, 0, 0, num_queries - count)).view(-1, columns, dim).transpose(1, 2).contiguous()
    group = min(MAX_GROUP, _round_up(-(-num_queries // torch.get_num_threads()), columns))
    sizes = {"num_rows": len(rows), "dim": dim, "num_queries": num_queries, "group": group}
    return {"rows": rows, "queries": packed, **sizes}


def _round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def _as_int32(ids: Tensor) -> Tensor:
    """Ids as int32, viewed as float32 as ``launch`` requires."""
    return ids.to(torch.int32).contiguous().view(torch.float32)
