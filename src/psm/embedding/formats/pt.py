"""PyTorch's .pt: a dictionary of tensors, lists and text that ``torch.load(..., weights_only=True)`` reads."""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from psm.embedding.table import Content, Table, about_text, parse_about


def write(path: Path, table: Table) -> None:
    content: dict[str, Any] = {
        "embeddings": _tensor(table.embeddings),
        "paths": list(table.paths),
        "psm": about_text(table.about),
    }
    if table.labels is not None:
        content |= {"labels": _tensor(table.labels), "classes": list(table.classes)}
    torch.save(content, path)


def _tensor(array: np.ndarray) -> torch.Tensor:
    """A tensor on the same memory, which may be a file's."""
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def read(path: Path) -> Content:
    content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    labels = content.get("labels")
    return Content(
        content["embeddings"].numpy(),
        list(content["paths"]),
        parse_about(content.get("psm")),
        labels=None if labels is None else labels.numpy(),
    )
