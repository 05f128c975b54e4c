"""NumPy's .npz: ``embeddings``, ``paths``, ``labels`` as names, and ``psm``, the description as JSON."""

import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from psm.embedding.formats.npy import write_array
from psm.embedding.table import Content, Table, about_text, parse_about


def write(path: Path, table: Table) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
        with archive.open("embeddings.npy", "w", force_zip64=True) as file:
            write_array(file, table)
        _write_texts(archive, "paths", table, lambda block: block.paths)
        if table.labels is not None:
            _write_texts(archive, "labels", table, lambda block: [n or "" for n in block.class_names(table.classes)])
        with archive.open("psm.npy", "w") as file:
            np.lib.format.write_array(file, np.array(about_text(table.about)), allow_pickle=False)


def _write_texts(archive: zipfile.ZipFile, name: str, table: Table, texts: Any) -> None:
    """An array of text, compressed: NumPy stores each with the length of the longest."""
    longest = max((len(text) for block in table.blocks() for text in texts(block)), default=1)
    kind = np.dtype(f"<U{max(1, longest)}")
    info = zipfile.ZipInfo(f"{name}.npy")
    info.compress_type = zipfile.ZIP_DEFLATED
    with archive.open(info, "w", force_zip64=True) as file:
        header = {"descr": kind.str, "fortran_order": False, "shape": (len(table),)}
        np.lib.format.write_array_header_1_0(file, header)
        for block in table.blocks():
            file.write(np.array(texts(block), dtype=kind).tobytes())


def read(path: Path) -> Content:
    with np.load(path, allow_pickle=False) as arrays:
        about = parse_about(str(arrays["psm"])) if "psm" in arrays else None
        labels = arrays["labels"].tolist() if "labels" in arrays else None
        return Content(arrays["embeddings"], arrays["paths"].tolist(), about, names=labels)
