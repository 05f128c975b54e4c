"""Search among many embeddings: loading, exact search and faiss.

    python benchmarks/search.py [--rows 1000000] [--width 256] [--turns 5] [--faiss]
    python benchmarks/search.py --recall FEATURES

Embeddings are drawn around a thousand centers, and the queries around the same centers. Such clusters are easier for
faiss than an encoder's features; so its recall is measured in a file of `psm embed`, some of whose rows are the
queries: the share of the ten nearest other rows that faiss finds, at several numbers of lists looked into.
"""

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np

from psm.embedding.formats import find_format
from psm.embedding.index import ImageIndex
from psm.embedding.table import Table, checksum
from turns import in_turns, keep, shown, spread, timed

CENTERS, SPREAD, K, QUERIES = 1000, 1.0, 10, 100
PROBES = (8, 32, 128)  # lists looked into
RECALLED = 1000  # queries of the recall


def drawn(count: int, centers: np.ndarray, random: np.random.Generator) -> np.ndarray:
    width = centers.shape[1]
    rows = centers[random.integers(0, len(centers), count)]
    return rows + (SPREAD * width**-0.5) * random.standard_normal((count, width), dtype=np.float32)


def measure_recall(file: Path) -> None:
    """Print and keep the recall of faiss among the rows of a file."""
    exact = ImageIndex(file)
    rows = np.linspace(0, len(exact) - 1, min(RECALLED, len(exact))).round().astype(int)
    queries = exact.vectors(rows.tolist())
    true = exact.search(queries, K, exclude=rows)[1].tolist()
    results: dict[str, object] = {"rows": len(exact), "width": exact.table.embeddings.shape[1], "queries": len(rows)}
    for probes in PROBES:
        found = ImageIndex(file, "faiss", probes).search(queries, K, exclude=rows)[1].tolist()
        each = [len({*a} & {*b}) / K for a, b in zip(true, found, strict=True)]
        print(f"recall among {len(exact):,} rows, {probes:3} lists: {np.mean(each):.4f}", flush=True)
        results[f"recall, {probes} lists"] = float(np.mean(each))
    keep("search-recall", results)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--faiss", action="store_true", help="measure faiss too; its index takes minutes to make")
    parser.add_argument("--recall", type=Path, metavar="FEATURES", help="measure the recall in this file alone")
    options = parser.parse_args()
    if options.recall:
        measure_recall(options.recall)
        return
    random = np.random.default_rng(0)
    centers = random.standard_normal((CENTERS, options.width), dtype=np.float32)
    centers /= np.linalg.norm(centers, axis=1, keepdims=True)
    rows, queries = drawn(options.rows, centers, random), drawn(QUERIES, centers, random)
    results: dict[str, object] = {"rows": options.rows, "width": options.width}
    with tempfile.TemporaryDirectory() as place:
        for suffix in (".npy", ".parquet"):
            file = Path(place) / f"features{suffix}"
            about = {"count": len(rows), "encoder": {"width": options.width}, "crc32": checksum(rows), "classes": []}
            form = find_format(file, "out")
            table = Table(rows, [f"{i:07}.jpg" for i in range(len(rows))], None, (), about)
            for added, write in form.beside.items():
                write(file.with_name(file.name + added), table)
            form.write(file, table)
            loading = spread([timed(lambda file=file: ImageIndex(file)) for _ in range(3)])
            print(f"loading {suffix[1:]:8} {shown(loading)} s, the checksum of all rows included", flush=True)
            results[f"loading {suffix[1:]}, s"] = loading
        file = Path(place) / "features.npy"
        index = ImageIndex(file)
        works = {n: lambda n=n: timed(lambda: index.search(queries[:n], K)) for n in (1, 10, QUERIES)}
        for count, values in in_turns(works, options.turns).items():
            print(f"exact, {count:3} queries {shown(spread(values), 3)} s", flush=True)
            results[f"exact, {count} queries, s"] = spread(values)
        if options.faiss:
            start = time.perf_counter()
            ImageIndex(file, "faiss")
            results["faiss, made once, s"] = time.perf_counter() - start
            for probes in PROBES:
                fast = ImageIndex(file, "faiss", probes)
                times = in_turns({"faiss": lambda fast=fast: timed(lambda: fast.search(queries[:1], K))}, options.turns)
                seconds = spread(times["faiss"])
                print(f"faiss, {probes:3} lists: {shown(seconds, 4)} s a query", flush=True)
                results[f"faiss, {probes} lists, s a query"] = seconds
    keep("search", results)


if __name__ == "__main__":
    main()
