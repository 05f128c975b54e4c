"""safetensors: ``embeddings``, ``labels`` as numbers, and ``paths`` as bytes with a zero after each.

Written block by block: the library's own writer copies all tensors into memory first.
"""

import json
from pathlib import Path

import numpy as np

from psm.embedding.table import Content, Table, about_text, parse_about

KINDS = {"float32": "F32", "float16": "F16", "int64": "I64", "uint8": "U8"}
END = b"\0"  # after each path; no file name holds it


def write(path: Path, table: Table) -> None:
    length = sum(len(text) for block in table.blocks() for text in _encoded(block.paths))
    tensors = {"embeddings": (table.embeddings.dtype, table.embeddings.shape), "paths": (np.dtype(np.uint8), (length,))}
    if table.labels is not None:
        tensors["labels"] = (table.labels.dtype, table.labels.shape)
    header: dict[str, object] = {"__metadata__": {"psm": about_text(table.about)}}
    end = 0
    for name, (kind, shape) in sorted(tensors.items(), key=lambda item: -item[1][0].itemsize):  # alignment
        start, end = end, end + int(np.prod(shape, dtype=np.int64)) * kind.itemsize
        header[name] = {"dtype": KINDS[kind.name], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        if table.labels is not None:
            file.write(np.ascontiguousarray(table.labels).data)
        for block in table.blocks():
            file.write(np.ascontiguousarray(block.embeddings).data)
        for block in table.blocks():
            file.writelines(_encoded(block.paths))


def _encoded(paths: list[str]) -> list[bytes]:
    return [path.encode() + END for path in paths]


def read(path: Path) -> Content:
    from safetensors import safe_open

    with safe_open(path, "np") as file:
        about = parse_about((file.metadata() or {}).get("psm"))
        labels = file.get_tensor("labels") if "labels" in file.keys() else None  # noqa: SIM118  not a dictionary
        paths = file.get_tensor("paths").tobytes().decode().split(END.decode())[:-1]
        return Content(file.get_tensor("embeddings"), paths, about, labels=labels)
