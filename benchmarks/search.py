"""Search among many embeddings: loading, exact search and faiss.

    python benchmarks/search.py [--rows 1000000] [--width 256] [--turns 5]

Embeddings are drawn around as many centers as an encoder's features have clusters, and the queries around the same
centers. Recall: the share of the ten nearest rows that faiss finds, at several numbers of lists looked into.
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


def drawn(count: int, centers: np.ndarray, random: np.random.Generator) -> np.ndarray:
    width = centers.shape[1]
    rows = centers[random.integers(0, len(centers), count)]
    return rows + (SPREAD * width**-0.5) * random.standard_normal((count, width), dtype=np.float32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--faiss", action="store_true", help="measure faiss too; its index takes minutes to make")
    options = parser.parse_args()
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
            true = index.search(queries, K)[1]
            for probes in (8, 32, 128):
                fast = ImageIndex(file, "faiss", probes)
                found = fast.search(queries, K)[1]
                recall = np.mean([len({*a} & {*b}) / K for a, b in zip(true.tolist(), found.tolist(), strict=True)])
                times = in_turns({"faiss": lambda fast=fast: timed(lambda: fast.search(queries[:1], K))}, options.turns)
                seconds = spread(times["faiss"])
                print(f"faiss, {probes:3} lists: {shown(seconds, 4)} s a query, recall {recall:.3f}", flush=True)
                results[f"faiss, {probes} lists"] = {"seconds": seconds, "recall": float(recall)}
    keep("search", results)


if __name__ == "__main__":
    main()
