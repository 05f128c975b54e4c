"""A method of your own, registered without touching the package, and trained like any other."""

import sys

import psm
from psm.methods.registry import register

# MoCo's bank, SNCLR's soft neighbors and HCL's weights for hard negatives in one, with PNSM on top.
register(
    "mine",
    title="soft neighbors against a mined bank of hard negatives",
    reference="this file",
    base="snclr",
    positives={"k": 3, "weighting": "V2"},
    negatives={"source": "bank", "mass": "hard", "beta": 0.5, "pnsm": True},
)


def main(out: str, **keys):
    settings = {"data": "shapes", "encoder": "tiny", "epochs": 2, "batch_size": 64, "bank": {"size": 1024}} | keys
    return psm.pretrain(out, method="mine", **settings)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "runs/mine")
