"""format=torchscript: one file that torch.jit.load and libtorch (C++, mobile) run without the network's code."""

import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn

from psm.exporting.archive_lines import class_lines, modules, opened
from psm.exporting.formats import Description, Features, Format
from psm.exporting.lines import imports, input_lines
from psm.exporting.source import DESCRIPTION, Source
from psm.models.encoder import Encoder


def write(source: Source, path: Path, description: Description) -> None:
    """Trace the encoder, whose inputs have one size, and script the rest, whose inputs have any."""
    size = source.info.size
    steps: list[nn.Module] = []
    with _quiet(), torch.no_grad():
        for step in source.graph:
            if isinstance(step, Encoder):
                step = torch.jit.trace(step, torch.zeros(2, 3, size, size), check_trace=False)
            steps.append(step)
        module = torch.jit.script(nn.Sequential(*steps).eval())
        torch.jit.save(module, path, _extra_files={DESCRIPTION: json.dumps(description, indent=2).encode()})


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence torch's advice to use torch.export: whoever asks for TorchScript needs it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def load(source: Source, path: Path) -> Features:
    with _quiet():
        return torch.jit.load(path, map_location="cpu")


def usage(source: Source, file: str) -> list[str]:
    config = source.config
    return [
        imports(*modules(source), "torch", preprocess=config.preprocess),
        *opened("torch.jit.load", "_extra_files", file, source),
        *input_lines(source.info, preprocess=config.preprocess, layout=config.layout),
        f"{source.output} = encoder(images)  # (1, {source.width})",
        *class_lines(source),
    ]


TORCHSCRIPT = Format("torchscript", (".pt", ".ts", ".torchscript"), write, load, usage, graph=True)
