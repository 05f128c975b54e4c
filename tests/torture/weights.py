"""Weights that `torture.keep_weights` has kept after some steps: how far two such records are apart."""

from pathlib import Path

import torch

STEPS = (1, 3, 10, 31)
FOLDER = "TORTURE_WEIGHTS"  # the variable that names the folder to write to


def distances(folder: Path, other: Path) -> dict[str, float]:
    """How far the weights are apart, relative to their length, by step."""
    found = {}
    for step in STEPS:
        a, b = (torch.load(path / f"{step}.pt", weights_only=True) for path in (folder, other))
        found[str(step)] = float((a - b).norm() / a.norm())
    return found


def arguments(out: Path, precision: str) -> list[str]:
    """`psm pretrain` for 31 steps of 32 images, with mined samples from the second step on."""
    return [
        *("pretrain", "data=shapes", "encoder=tiny", "batch_size=32", "images.limit=256", "images.size=16"),
        *("heads.hidden_dim=24", "heads.out_dim=12", "bank.size=64", "monitor.knn=false", "progress=false"),
        *("epochs=4", "accelerator=cpu", f"precision={precision}", f"out={out}"),
        "callbacks=[torture.keep_weights.KeepWeights]",
    ]
