"""format=torch-export: a torch.export program (.pt2), for torch.compile, AOTInductor and ExecuTorch."""

import json
import warnings
from pathlib import Path

import torch
from torch.export import Dim

from psm.exporting.archive_lines import class_lines, modules, opened
from psm.exporting.formats import Description, Features, Format
from psm.exporting.lines import imports, input_lines
from psm.exporting.source import DESCRIPTION, Source


def write(source: Source, path: Path, description: Description) -> None:
    sizes = {0: Dim.DYNAMIC}
    if source.config.preprocess:
        rows = 1 if source.config.layout == "nhwc" else 2
        sizes |= {rows: Dim.DYNAMIC, rows + 1: Dim.DYNAMIC}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.export.export(source.graph, (source.example(),), dynamic_shapes=(sizes,))
        torch.export.save(program, path, extra_files={DESCRIPTION: json.dumps(description, indent=2)})


def load(source: Source, path: Path) -> Features:
    return torch.export.load(path).module()


def usage(source: Source, file: str) -> list[str]:
    config = source.config
    return [
        imports(*modules(source), "torch", preprocess=config.preprocess),
        *opened("torch.export.load", "extra_files", file, source, ".module()"),
        *input_lines(source.info, preprocess=config.preprocess, layout=config.layout),
        f"{source.output} = encoder(images)  # (1, {source.width})",
        *class_lines(source),
    ]


TORCH_EXPORT = Format("torch-export", (".pt2",), write, load, usage, graph=True)
