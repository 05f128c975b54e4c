"""Files of weights alone: a state dict as .pth or .safetensors, with the description inside."""

import json
import zipfile
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from psm.exporting.formats import Description
from psm.exporting.source import DESCRIPTION, Source
from psm.models.pretrained import checksum


def write_weights(source: Source, path: Path, description: Description) -> None:
    """Write the state dict by the file's suffix.

    A .pth is a plain state dict for ``torch.load``; the description is one more file of its archive, where TorchScript
    has its extra files. A .safetensors has it in its metadata; `psm.load_encoder` reads it too.
    """
    if path.suffix == ".safetensors":
        known = dict(description) | asdict(source.public_info) | {"crc32": checksum(source.state)}
        save_file(source.state, path, metadata={"format": "pt", "psm": json.dumps(known)})
        return
    torch.save(source.state, path)
    with zipfile.ZipFile(path, "a") as archive:
        folder = archive.namelist()[0].partition("/")[0]
        archive.writestr(f"{folder}/extra/{DESCRIPTION}", json.dumps(description, indent=2))


def read_weights(path: Path) -> dict[str, Tensor]:
    """The state dict, as users of the file read it."""
    if path.suffix == ".safetensors":
        return load_file(path)
    return torch.load(path, map_location="cpu", weights_only=True)


def read_line(file: str) -> str:
    """The expression that reads a file of weights."""
    if file.endswith(".safetensors"):
        return f'safetensors.torch.load_file("{file}")'
    return f'torch.load("{file}", weights_only=True)'


def reader_module(file: str) -> str:
    """The module that ``read_line`` needs."""
    return "safetensors.torch" if file.endswith(".safetensors") else "torch"
