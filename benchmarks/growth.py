"""How the search in the bank and the loss of PSM grow with bank, batch and k, and what an approximate index takes.

    python benchmarks/growth.py [--threads 2]

Milliseconds of one direction's exact search, and of a symmetric loss with its gradient, beside BYOL's loss. Where faiss
is installed (psm[faiss]) the search with `bank.index=faiss` is timed on the same rows, with its recall and with what it
takes to keep the index up to date: 256 rows come and go with every step, and centroids are found anew for each round
through the bank. These rows are drawn; recall on learnt ones is what benchmarks/recall.py measures.
"""

import argparse
import os
import time
from importlib.util import find_spec

import torch
from torch.nn.functional import normalize

from psm.bank import Bank
from psm.config import BankConfig, PositivesConfig
from psm.contrast import loss_of
from psm.methods import compose
from psm.topology import Embeddings
from turns import in_turns, keep, shown, spread

BATCH, BANK, K, WIDTH = 256, 16384, 5, 128
CASES = (
    *(("bank", BATCH, size, K) for size in (4096, 16384, 65536, 262144, 1_000_000)),
    *(("batch", batch, BANK, K) for batch in (64, 256, 1024, 4096)),
    *(("k", BATCH, BANK, k) for k in (1, 5, 20, 50)),
)


def clustered(count: int, generator: torch.Generator) -> torch.Tensor:
    """Unit vectors in a thousand clumps, as features are: an index by clusters would be hopeless on noise."""
    centres = torch.randn(1000, WIDTH, generator=torch.Generator().manual_seed(1))
    where = torch.randint(0, 1000, (count,), generator=generator)
    return normalize(centres[where] + 0.7 * torch.randn(count, WIDTH, generator=generator), dim=1)


def full_bank(size: int) -> Bank:
    bank, generator = Bank(size, WIDTH), torch.Generator().manual_seed(0)
    for first in range(0, size, 65536):
        rows = min(65536, size - first)
        bank.push(clustered(rows, generator), torch.arange(first, first + rows))
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
    wishes = {"positives": PositivesConfig(k=k), "bank": BankConfig(size=size)}
    psm, byol = compose("psm", wishes), compose("byol")
    times = in_turns(
        {
            "search": lambda: milliseconds(lambda: bank.nearest(queries, k, ids)),
            "loss": lambda: milliseconds(lambda: loss_of(embeddings, psm, bank, ids).loss.backward()),
            "byol": lambda: milliseconds(lambda: loss_of(embeddings, byol, None, ids).loss.backward()),
        },
        turns,
    )
    return {name: spread(values) for name, values in times.items()} | approximate(bank, queries, k, turns)


def approximate(bank: Bank, queries: torch.Tensor, k: int, turns: int) -> dict:
    """With an index: milliseconds of a search and of a step's upkeep, and the share of true neighbours found."""
    if not find_spec("faiss"):
        return {}
    fast = Bank(bank.size, WIDTH, "faiss")
    fast.push(bank.rows, bank.ids)
    found, true = (one.nearest(queries, k).vectors for one in (fast, bank))

    def upkeep() -> float:
        """A push, and a push's share of finding centroids and lists anew."""
        push = milliseconds(lambda: fast.push(bank.rows[:BATCH], bank.ids[:BATCH]))
        anew = milliseconds(lambda: (fast.index.fit(fast.rows), fast.nearest(queries[:1], k)))
        fast.pointer = 0
        return push + anew * BATCH / bank.size

    times = in_turns(
        {
            "faiss search": lambda: milliseconds(lambda: fast.nearest(queries, k)),
            "faiss upkeep": upkeep,
        },
        turns,
    )
    return {name: spread(values) for name, values in times.items()} | {"faiss recall": recall(found, true)}


def recall(found: torch.Tensor, true: torch.Tensor) -> float:
    """The share of the true neighbours (N, k, D) among those found."""
    return (found[:, :, None] == true[:, None]).all(3).any(1).float().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    line = "{:>6} {:>8} {:>3} {:>22} {:>24} {:>32}".format
    print(line("batch", "bank", "k", "search, ms", "loss, ms", "faiss: search, upkeep, recall"))
    rows = []
    for axis, batch, size, k in CASES:
        found = case(batch, size, k, options.turns)
        rows.append({"axis": axis, "batch": batch, "bank": size, "k": k, **found})
        index = ""
        if "faiss recall" in found:
            index = ", ".join(f"{found[f'faiss {part}']['median']:.1f}" for part in ("search", "upkeep"))
            index += f", {found['faiss recall']:.2f}"
        print(line(batch, size, k, shown(found["search"], 1), shown(found["loss"], 1), index), flush=True)
    keep("growth", rows)


if __name__ == "__main__":
    main()
