"""Presets of the experiments, one row per scale. Imports nothing heavy."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from psm.utils.errors import UserError, did_you_mean


@dataclass(frozen=True)
class Preset:
    """Settings of every run at one scale: keys of `psm pretrain`, and knn.* and linear.* of `psm evaluate`."""

    name: str
    title: str
    takes: str  # rough duration, in words
    settings: Mapping[str, Any] = field(default_factory=dict)
    data: tuple[str, ...] | None = None  # None: the paper's data sets of each experiment
    seeds: tuple[int, ...] = (0,)
    sweep_seeds: tuple[int, ...] = (0,)  # of the points of figures 5 to 8; their reference row has all seeds
    tuned: bool = False  # each method with settings of its own, from tuned.yaml


_OVERNIGHT: dict[str, Any] = {
    "encoder": "tiny",
    "batch_size": 64,  # 15,620 steps: at 128 the same number of steps would take twice the time
    "bank.size": 4096,  # 64 batches, as in the paper, so that rows are as many steps old
    "epochs": 20,
    "optim.lr": 0.06,
    "monitor.every": 10,
    "linear.lr_grid": [0.1, 0.03, 0.01, 0.003, 0.001],
}

PRESETS: dict[str, Preset] = {
    row.name: row
    for row in (
        Preset(
            "paper",
            "the paper's settings: ResNet-18, batch 256, 200 epochs, a bank of 16,384",
            "not measured here; meant for a GPU",
            {"encoder": "resnet18", "batch_size": 256, "epochs": 200, "bank.size": 16384, "optim.lr": 0.1},
        ),
        Preset(
            "laptop",
            "CIFAR-10 on a CPU: 10,000 images, a small encoder, batch 64, lr 0.06, 10 epochs, three seeds",
            "roughly 3 hours for all on two CPU cores with jobs=2 (65 runs of 4 to 8 core-minutes)",
            {
                "images.limit": 10_000,
                "encoder": "tiny",
                "batch_size": 64,
                "bank.size": 4096,
                "epochs": 10,
                "optim.lr": 0.06,
                "monitor.every": 5,
            },
            data=("cifar10",),
            seeds=(0, 1, 2),
        ),
        Preset(
            "overnight",
            "all 50,000 images of CIFAR-10 on a CPU: a small encoder, batch 64, 20 epochs (15,620 steps), three seeds",
            "16 to 29 minutes a run on one core, twice as long with four views; 65 runs for all",
            _OVERNIGHT,
            data=("cifar10",),
            seeds=(0, 1, 2),
        ),
        Preset(
            "tuned",
            "overnight with settings for each method where tuned.yaml has any: published ones and choices of settle",
            "as overnight",
            _OVERNIGHT,
            data=("cifar10",),
            seeds=(0, 1, 2),
            tuned=True,
        ),
        Preset(
            "smoke",
            "a check that everything runs: synthetic shapes, a small encoder, one epoch; its scores mean nothing",
            "roughly 8 seconds a run on one CPU core, 5 minutes for all",
            {
                "images.limit": 128,
                "images.size": 16,
                "encoder": "tiny",
                "heads.hidden_dim": 24,
                "heads.out_dim": 12,
                "batch_size": 32,
                "bank.size": 64,
                "epochs": 1,
                "monitor.images": 64,
                "monitor.test_images": 64,
                "linear.epochs": 2,
            },
            data=("shapes",),
        ),
    )
}


def find(name: str) -> Preset:
    """The preset of that name."""
    if name not in PRESETS:
        raise UserError(f"preset={name} is unknown{did_you_mean(name, PRESETS)}: choose one of {', '.join(PRESETS)}.")
    return PRESETS[name]
