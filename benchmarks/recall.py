"""How much of what an exact search finds `bank.index=faiss` finds too, among the keys of a trained encoder.

    python benchmarks/recall.py RUN [--root data] [--sizes 16384 65536] [--k 5]

The bank holds keys of views of the run's images, the queries are 1,024 other views, and rows of a query's own image
are passed over, as in training.
"""

import argparse
from pathlib import Path

import torch

from growth import BATCH, milliseconds
from psm.config.schema import ImagesConfig, ViewsConfig
from psm.data import load_dataset
from psm.evaluation.mining_analysis import RunSnapshot, load_snapshot
from psm.mining.memory_bank import MemoryBank
from psm.views.transform import Views
from turns import in_turns, keep, shown, spread

QUERIES = 1024


@torch.inference_mode()
def keys(moment: RunSnapshot, images, count: int) -> torch.Tensor:
    """Keys of so many views, each image in turn."""
    plain, draws = moment.views, torch.Generator().manual_seed(0)
    views = Views(ViewsConfig(size=plain.size), plain.size, plain.mean, plain.std)
    found = []
    for first in range(0, count, 512):
        rows = torch.arange(first, min(first + 512, count)) % len(images)
        given = views.apply(images.take(rows), views.sample_params(len(rows), draws, 1))
        found.append(moment.networks.embed_keys(given.flatten(0, 1)))
    return torch.cat(found)


def recall(found: torch.Tensor, true: torch.Tensor) -> float:
    """The share of the true neighbors (N, k, D) among those found."""
    return (found[:, :, None] == true[:, None]).all(3).any(1).float().mean().item()


def upkeep(bank: MemoryBank, queries: torch.Tensor) -> float:
    """Milliseconds that a step takes to push 256 rows, its share of finding centroids and lists anew included."""
    bank.pointer = 0
    push = milliseconds(lambda: bank.enqueue(bank.rows[:BATCH].clone(), bank.ids[:BATCH].clone()))
    if bank.index is None:
        return push
    anew = milliseconds(lambda: (bank.index.fit(bank.rows), bank.search(queries[:1], 1)))
    return push + anew * BATCH / bank.size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--root", default="data", help="where published sets lie")
    parser.add_argument("--sizes", type=int, nargs="+", default=[16384, 65536])
    parser.add_argument("--k", type=int, default=5)
    parser.add_argument("--turns", type=int, default=7)
    options = parser.parse_args()
    moment = load_snapshot(options.run / "checkpoints" / "last.ckpt")
    config = moment.config
    wanted = ImagesConfig(root=options.root, limit=config.images.limit, download=False)
    images = load_dataset(config.data, wanted, progress=False).train
    vectors = keys(moment, images, max(options.sizes) + QUERIES)
    ids = torch.arange(len(vectors)) % len(images)
    queries, rows, own, ids = vectors[:QUERIES], vectors[QUERIES:], ids[:QUERIES], ids[QUERIES:]
    print(f"{'bank':>8} {'exact, ms':>20} {'a push':>20} {'faiss, ms':>20} {'a push':>20} {'recall':>7}")
    found = []
    for size in options.sizes:
        exact, fast = MemoryBank(size, rows.shape[1]), MemoryBank(size, rows.shape[1], "faiss")
        for bank in (exact, fast):
            bank.enqueue(rows[:size], ids[:size])
        share = recall(*(bank.search(queries, options.k, own).vectors for bank in (fast, exact)))
        work = {}
        for name, bank in (("exact", exact), ("faiss", fast)):
            work[name] = lambda b=bank: milliseconds(lambda: b.search(queries[:BATCH], options.k, own[:BATCH]))
            work[f"{name}, upkeep"] = lambda b=bank: upkeep(b, queries)
        spreads = {name: spread(values) for name, values in in_turns(work, options.turns).items()}
        print(
            f"{size:>8} {' '.join(f'{shown(values, 1):>20}' for values in spreads.values())} {share:>7.3f}", flush=True
        )
        found.append({"bank": size, "k": options.k, "recall": share, **spreads})
    keep("recall", found)


if __name__ == "__main__":
    main()
