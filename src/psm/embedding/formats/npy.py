"""NumPy's .npy: the embeddings alone, memory-mapped when read; names and description in files beside it."""

import csv
from pathlib import Path
from typing import IO

import numpy as np

from psm.embedding.table import Content, Table, about_text, parse_about

NAMES, ABOUT = ".names.csv", ".json"


def write(path: Path, table: Table) -> None:
    with path.open("wb") as file:
        write_array(file, table)


def write_array(file: IO[bytes], table: Table) -> None:
    """Write the embeddings in the .npy format, block by block."""
    embeddings = table.embeddings
    header = {
        "descr": np.lib.format.dtype_to_descr(embeddings.dtype),
        "fortran_order": False,
        "shape": embeddings.shape,
    }
    np.lib.format.write_array_header_1_0(file, header)
    for block in table.blocks():
        file.write(np.ascontiguousarray(block.embeddings).data)


def write_names(path: Path, table: Table) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["path"] if table.labels is None else ["path", "label"])
        for block in table.blocks():
            names = block.class_names(table.classes)
            writer.writerows([path] for path in block.paths) if names is None else writer.writerows(
                zip(block.paths, names, strict=True)
            )


def write_about(path: Path, table: Table) -> None:
    path.write_text(about_text(table.about), encoding="utf-8")


BESIDE = {NAMES: write_names, ABOUT: write_about}


def read(path: Path) -> Content:
    embeddings = np.load(path, mmap_mode="c", allow_pickle=False)
    about = read_about(path)
    with path.with_name(path.name + NAMES).open(encoding="utf-8", newline="") as file:
        header, *rows = csv.reader(file)
    names = [row[1] for row in rows] if len(header) > 1 else None
    return Content(embeddings, [row[0] for row in rows], about, names=names)


def read_about(path: Path) -> dict | None:
    """The description beside a file; None if it is not there."""
    beside = path.with_name(path.name + ABOUT)
    return parse_about(beside.read_bytes()) if beside.exists() else None
