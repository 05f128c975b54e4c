"""format=safetensors: the weights of the encoder in one file that psm and safetensors load."""

from pathlib import Path

from psm.exporting.formats import Description, Features, Format
from psm.exporting.lines import PHOTO
from psm.exporting.source import Source
from psm.exporting.weights import write_weights
from psm.models.encoder import unwrapped
from psm.models.pretrained import CUSTOM, load_encoder


def write(source: Source, path: Path, description: Description) -> None:
    write_weights(source, path, description)


def load(source: Source, path: Path) -> Features:
    own = unwrapped(source.encoder) if source.info.encoder == CUSTOM else None
    return load_encoder(path, own)


def usage(source: Source, file: str) -> list[str]:
    own = ", my_network" if source.info.encoder == CUSTOM else ""
    return [
        "import psm",
        f'encoder = psm.load_encoder("{file}"{own})',
        f'features = encoder(encoder.preprocess(["{PHOTO}"]))  # (1, {source.info.width})',
    ]


SAFETENSORS = Format("safetensors", (".safetensors",), write, load, usage)
