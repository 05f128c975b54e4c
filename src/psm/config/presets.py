"""Presets of pretraining: what the keys are that a user does not give. Imports nothing heavy."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class PretrainPreset:
    """Settings for one scale; a key that is given wins over them."""

    name: str
    about: str
    settings: Mapping[str, Any] = field(default_factory=dict)  # dotted keys of `psm pretrain`


LAPTOP = PretrainPreset(
    "laptop",
    "a small network on few, small images, for a CPU",
    {
        "encoder": "tiny",
        "epochs": 30,
        "batch_size": 64,
        "bank.size": 4096,
        "images.limit": 10_000,
        "images.max_size": 64,
    },
)
# The defaults of the schema are the paper's.
PAPER = PretrainPreset("paper", "the paper's scale, for a GPU: resnet18, 200 epochs, batch 256")

PRETRAIN_PRESETS = {preset.name: preset for preset in (LAPTOP, PAPER)}
