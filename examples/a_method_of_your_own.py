"""A method of your own, registered without touching the package, and trained like any other."""

import sys
from typing import Any

import psm

# MoCo's bank, SNCLR's soft neighbors and HCL's weighting of hard negatives in one, with PNSM on top.
psm.register_method(
    "mine",
    title="soft neighbors against a mined bank of hard negatives",
    reference="this file",
    base="snclr",
    positives={"k": 3, "weights": "V2"},
    negatives="bank",
    sampler="pnsm",
    weighting={"name": "hard", "beta": 0.5},
)


def main(out: str, **keys: Any) -> Any:
    settings = {"data": "shapes", "encoder": "tiny", "epochs": 2, "batch_size": 64, "bank": {"size": 1024}} | keys
    return psm.pretrain(out, method="mine", **settings)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "runs/mine")
