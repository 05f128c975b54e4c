"""Operations of a step beside the networks, with their kernels and by their plain definitions in PyTorch.

    python benchmarks/parts.py [--threads 2] [--turns 15]

Top-k similarity search in a bank, MoCo v2's log-sum-exp over a whole bank with its gradient, and views (`psm.ops`).
"""

import argparse
import os
from collections.abc import Callable, Iterator

import torch
from torch.nn.functional import normalize

from psm import kernels, ops
from psm.config.schema import ViewsConfig
from psm.mining.memory_bank import MemoryBank
from psm.views.transform import Views
from turns import beside_torch, keep, timed

WIDTH, REPEATS = 128, 5
SEARCHES = ((256, 16384, 5), (256, 16384, 40), (64, 4096, 5), (32, 2048, 5))  # queries, rows, k
VIEWS = ((256, 32, 0.0), (256, 32, 0.5), (256, 64, 0.0), (256, 64, 0.5), (32, 32, 0.0))  # images, pixels, blur
SUMS = ((256, 16384), (64, 4096), (32, 2048))  # queries, rows
Case = tuple[str, Callable[[], object]]


def searches() -> Iterator[Case]:
    for count, size, k in SEARCHES:
        bank, queries, own = MemoryBank(size, WIDTH), torch.randn(count, WIDTH), torch.arange(count)
        bank.enqueue(torch.randn(size, WIDTH), torch.arange(size) % (size // 2))
        name = f"search of {k} for {count} queries in {size:,} rows"
        yield name, lambda b=bank, q=queries, k=k, o=own: b.search(q, k, o)


def views() -> Iterator[Case]:
    for count, pixels, blur in VIEWS:
        recipe = Views(ViewsConfig(blur=blur), pixels, (0.5,) * 3, (0.25,) * 3)
        images = torch.randint(0, 256, (count, 3, pixels, pixels), dtype=torch.uint8)
        draws = recipe.sample_params(count, torch.Generator().manual_seed(0))
        name = f"two views of {count} images at {pixels} pixels{', blur' if blur else ''}"
        yield name, lambda r=recipe, p=images, d=draws: r.apply(p, d, channels_last=True)


def sums() -> Iterator[Case]:
    for count, size in SUMS:
        queries = (normalize(torch.randn(count, WIDTH), dim=1) / 0.2).requires_grad_()
        rows = normalize(torch.randn(size, WIDTH), dim=1)

        def both_ways(queries: torch.Tensor = queries, rows: torch.Tensor = rows) -> None:
            queries.grad = None
            ops.logsumexp_similarity(queries, rows).sum().backward()

        yield f"sum over {size:,} rows for {count} queries", both_ways


def several(work: Callable[[], object]) -> float:
    """Seconds of one out of several."""
    return timed(lambda: [work() for _ in range(REPEATS)]) / REPEATS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--turns", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    ops.keep_freed_memory()  # as `psm pretrain` does
    print(f"{'':58} {'torch, ms':>9} {'psm, ms':>9}  {'times as fast':>20}")
    rows = []
    for name, work in (*searches(), *views(), *sums()):

        def plain(work: Callable = work) -> float:
            with kernels.disabled():
                return several(work)

        rows.append(beside_torch(name, plain, lambda w=work: several(w), options.turns))
    keep("parts", rows)


if __name__ == "__main__":
    main()
