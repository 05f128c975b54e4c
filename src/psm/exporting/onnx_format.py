"""format=onnx: one file with the graph and the weights, checked in onnxruntime."""

import io
import json
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from psm.exporting.formats import Description, Features, Format
from psm.exporting.lines import imports, input_lines
from psm.exporting.source import Source
from psm.utils.errors import UserError

INPUT = "images"  # its name in the graph

_CLASSES = (
    'classes = session.get_modelmeta().custom_metadata_map["classes"].split("\\n")',
    "print(classes[probabilities[0].argmax()])",
)


def write(source: Source, path: Path, description: Description) -> None:
    """Export by torch.onnx's exporter; every entry of the description is one of the file's metadata."""
    sizes = {0: "batch"}
    if source.config.preprocess:
        rows = 1 if source.config.layout == "nhwc" else 2
        sizes |= {rows: "height", rows + 1: "width"}
    with _quiet():
        program: Any = torch.onnx.export(
            source.graph,
            (source.example(),),
            dynamo=True,
            input_names=[INPUT],
            output_names=[source.output],
            dynamic_shapes=(sizes,),
            opset_version=source.config.opset,
            verbose=False,
        )
    model = program.model
    model.producer_name, model.producer_version = "psm", description["psm"]
    model.graph.name = description["name"]
    model.doc_string = "\n".join(description["usage"])
    for name, value in description.items():
        lines = isinstance(value, list) and all(isinstance(line, str) for line in value)
        text = "\n".join(value) if lines else value if isinstance(value, str) else json.dumps(value)
        model.metadata_props[name] = text
    try:
        program.save(path, external_data=False)
    except ValueError as error:  # protobuf holds 2 GB
        raise UserError(f"format=onnx cannot hold this encoder in one file ({error}): give another format.") from None


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the exporter's remarks on its own progress, which a user of psm cannot act on."""
    log = logging.getLogger("torch.onnx")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        log.setLevel(level)


def load(source: Source, path: Path) -> Features:
    """The file in onnxruntime, on the CPU."""
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])

    def features(images: Tensor) -> Tensor:
        return torch.from_numpy(session.run([source.output], {INPUT: images.numpy()})[0])

    return features


def usage(source: Source, file: str) -> list[str]:
    config = source.config
    return [
        imports("onnxruntime", preprocess=config.preprocess),
        f'session = onnxruntime.InferenceSession("{file}")',
        *input_lines(source.info, preprocess=config.preprocess, layout=config.layout, tensor=False),
        f'{source.output} = session.run(None, {{"{INPUT}": images}})[0]  # (1, {source.width})',
        *(_CLASSES if source.classes else ()),
    ]


ONNX = Format(
    "onnx",
    (".onnx",),
    write,
    load,
    usage,
    graph=True,
    needs=("onnx", "onnxscript", "onnxruntime"),
    extra="onnx",
)
