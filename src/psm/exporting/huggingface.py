"""format=hf: a folder for the Hugging Face Hub: weights, configuration, model card, the run's settings and pages."""

import json
import shutil
from pathlib import Path
from typing import Any

import yaml

from psm.config import merge as settings
from psm.config.schema import MAY_CHANGE, ResolvedPretrainConfig
from psm.data.location import data_name
from psm.exporting import safetensors_format
from psm.exporting.formats import Description, Features, Format
from psm.exporting.library_weights import library_name
from psm.exporting.model_card import SETTINGS, model_card
from psm.exporting.source import Source
from psm.exporting.weights import write_weights
from psm.models.published import HUB_WEIGHTS

CONFIG = "config.json"


def write(source: Source, folder: Path, description: Description) -> None:
    write_weights(source, folder / HUB_WEIGHTS, description)
    (folder / CONFIG).write_text(json.dumps(hub_config(source, description), indent=2) + "\n")
    if source.training is not None:
        (folder / SETTINGS).write_text(run_settings(source.training))
    pages = []
    if source.run is not None and source.config.pages:
        pages = [page for page in (source.run.page, source.run.inspection) if page.exists()]
    for page in pages:
        shutil.copyfile(page, folder / page.name)
    (folder / "README.md").write_text(model_card(source, description, [page.name for page in pages]))


def hub_config(source: Source, description: Description) -> dict[str, Any]:
    """config.json as timm reads it (``timm.create_model("hf-hub:...")``), and everything that psm knows below "psm"."""
    info = source.info
    name = library_name(info, "timm")
    return {
        "architecture": name or info.encoder,
        "num_classes": 0,
        "num_features": info.width,
        "pretrained_cfg": {
            "input_size": [3, info.size, info.size],
            "fixed_input_size": False,
            "mean": info.mean,
            "std": info.std,
            "interpolation": "lanczos",
            "crop_pct": 1.0,
            "crop_mode": "center",
            "num_classes": 0,
            "license": source.config.license.lower(),
        },
        "psm": dict(description),
    }


def run_settings(training: ResolvedPretrainConfig) -> str:
    """The settings of a run as YAML for `psm pretrain config=`, without paths and settings of the machine it ran on."""
    kept = settings.to_dict(training) | {"data": data_name(training.data)}
    kept["init"] = None if training.init is None else Path(training.init).name
    for dotted in MAY_CHANGE:
        group, _, name = dotted.partition(".")
        if name:
            kept[group].pop(name, None)
        else:
            kept.pop(group, None)
    return yaml.safe_dump(kept, sort_keys=False, allow_unicode=True)


def load(source: Source, folder: Path) -> Features:
    return safetensors_format.load(source, folder)


def is_export(folder: Path) -> bool:
    """True for a folder that this format wrote."""
    try:
        return "psm" in json.loads((folder / CONFIG).read_text())
    except (OSError, ValueError, TypeError):
        return False


def usage(source: Source, folder: str) -> list[str]:
    """Lines that run in the folder."""
    return safetensors_format.usage(source, ".")


HF = Format("hf", (), write, load, usage)
