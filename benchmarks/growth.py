"""How the search in the bank and the loss of PSM grow with bank, batch and k, and what an approximate index takes.

    python benchmarks/growth.py [--threads 2]

Milliseconds of one direction's exact search, and of a symmetric loss with its gradient, beside BYOL's loss. What
`bank.index=faiss` takes is measured by benchmarks/recall.py.
"""

import argparse
import os
import time

import torch
from torch.nn.functional import normalize

from psm.losses.method_loss import method_loss
from psm.methods import get_method
from psm.mining.memory_bank import MemoryBank
from psm.models.outputs import Embeddings
from turns import in_turns, keep, shown, spread

BATCH, BANK, K, WIDTH = 256, 16384, 5, 128
CASES = (
    *(("bank", BATCH, size, K) for size in (4096, 16384, 65536, 262144, 1_000_000)),
    *(("batch", batch, BANK, K) for batch in (64, 256, 1024, 4096)),
    *(("k", BATCH, BANK, k) for k in (1, 5, 20, 50)),
)


def clustered(count: int, generator: torch.Generator) -> torch.Tensor:
    """Unit vectors in a thousand clumps, as features are: an index by clusters would be hopeless on noise."""
    centers = torch.randn(1000, WIDTH, generator=torch.Generator().manual_seed(1))
    where = torch.randint(0, 1000, (count,), generator=generator)
    return normalize(centers[where] + 0.7 * torch.randn(count, WIDTH, generator=generator), dim=1)


def full_bank(size: int) -> MemoryBank:
    bank, generator = MemoryBank(size, WIDTH), torch.Generator().manual_seed(0)
    for first in range(0, size, 65536):
        rows = min(65536, size - first)
        bank.enqueue(clustered(rows, generator), torch.arange(first, first + rows))
    return bank


def milliseconds(work, repeats: int = 1) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        work()
    return 1e3 * (time.perf_counter() - start) / repeats


def case(batch: int, size: int, k: int, turns: int) -> dict:
    bank = full_bank(size)
    queries = clustered(batch, torch.Generator().manual_seed(2))
    ids = torch.arange(batch) + size
    embeddings = Embeddings(*(torch.randn(2, batch, WIDTH).requires_grad_(part < 2) for part in range(3)))
    overrides = {"positives": {"k": k}, "bank": {"size": size}}
    psm, byol = get_method("psm", **overrides), get_method("byol")
    times = in_turns(
        {
            "search": lambda: milliseconds(lambda: bank.search(queries, k, ids)),
            "loss": lambda: milliseconds(lambda: method_loss(embeddings, psm.criterion, bank, ids).loss.backward()),
            "byol": lambda: milliseconds(lambda: method_loss(embeddings, byol.criterion, None, ids).loss.backward()),
        },
        turns,
    )
    return {name: spread(values) for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    line = "{:>6} {:>8} {:>3} {:>22} {:>24}".format
    print(line("batch", "bank", "k", "search, ms", "loss, ms"))
    rows = []
    for axis, batch, size, k in CASES:
        found = case(batch, size, k, options.turns)
        rows.append({"axis": axis, "batch": batch, "bank": size, "k": k, **found})
        print(line(batch, size, k, shown(found["search"], 1), shown(found["loss"], 1)), flush=True)
    keep("growth", rows)


if __name__ == "__main__":
    main()
