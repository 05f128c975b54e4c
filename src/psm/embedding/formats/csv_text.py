"""CSV: path, label, embedding_0, embedding_1, ...; the description in a file beside it."""

import csv
from pathlib import Path

import numpy as np

from psm.embedding.formats.npy import ABOUT, read_about, write_about
from psm.embedding.table import Content, Table

BESIDE = {ABOUT: write_about}
DIGITS = {np.dtype(np.float32): "%.9g", np.dtype(np.float16): "%.5g"}  # enough to read back the same number


def write(path: Path, table: Table) -> None:
    labeled, width = table.labels is not None, table.embeddings.shape[1]
    numbers = ",".join([DIGITS[table.embeddings.dtype]] * width)
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["path", *(["label"] if labeled else []), *(f"embedding_{i}" for i in range(width))])
        for block in table.blocks():
            names = block.class_names(table.classes)
            texts = [[path] for path in block.paths] if names is None else zip(block.paths, names, strict=True)
            rows = block.embeddings.tolist()
            writer.writerows([*text, *(numbers % tuple(row)).split(",")] for text, row in zip(texts, rows, strict=True))


def read(path: Path) -> Content:
    about = read_about(path)
    with path.open(encoding="utf-8", newline="") as file:
        rows = csv.reader(file)
        header = next(rows)
        texts = 2 if "label" in header[:2] else 1
        kind = np.dtype((about or {}).get("dtype", "float32"))
        paths, labels, vectors = [], [], []
        for row in rows:
            paths.append(row[0])
            labels.append(row[1] if texts == 2 else None)
            vectors.append(np.array(row[texts:], dtype=kind))
    embeddings = np.stack(vectors) if vectors else np.empty((0, len(header) - texts), dtype=kind)
    return Content(embeddings, paths, about, names=labels if texts == 2 else None)
