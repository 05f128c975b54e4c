"""The cells of a comparison, a classifier each, and their results on disk, a file each."""

import base64
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from psm.evaluation.few_labels import LabelAmount, draw_labeled
from psm.utils.files import write_text_atomically

TITLES = {
    "scratch": "from scratch",
    "knn": "frozen, kNN",
    "logistic": "frozen, logistic regression",
    "finetune": "fine-tuned",
}
TRAINED = ("scratch", "finetune")  # arms that train a network, whose seed differs from draw to draw


@dataclass(frozen=True)
class Cell:
    """One classifier: how it is made, from how many labels, and which draw of them."""

    arm: str
    amount: str  # as the user gave it: 10 %, or 5 a class
    labels: int  # number of labeled images
    draw: int

    @property
    def name(self) -> str:
        return f"{self.arm}-{self.labels}-labels-draw-{self.draw + 1}"

    @property
    def title(self) -> str:
        """As progress calls it."""
        return f"{TITLES[self.arm]}, {self.labels:,} labels, draw {self.draw + 1}"


@dataclass(frozen=True)
class CellResult:
    """What a cell reached: which test images (M,) it classified right."""

    cell: Cell
    right: Tensor  # bool
    seconds: float
    settings: dict[str, Any]  # what was chosen for it: epochs, lr, C

    @property
    def top1(self) -> float:
        """In percent."""
        return 100 * self.right.double().mean().item()


def make_cells(
    labels: Tensor, amounts: Sequence[LabelAmount], arms: Sequence[str], draws: int, seed: int
) -> list[Cell]:
    """Every cell, draw by draw and from few labels to many, so that what is done first already shows the curve.

    With all labels the frozen features give the same classifier at every draw: there it is one cell.

    Args:
        labels: classes of all training images, (N,).
        amounts: how many of them are labeled.
        arms: names of `TITLES`.
        draws: number of draws.
        seed: decides them.
    """
    found: dict[str, Cell] = {}
    for draw in range(draws):
        for amount in sorted(amounts, key=lambda amount: len(draw_labeled(labels, amount, seed))):
            count = len(draw_labeled(labels, amount, seed, draw))
            for arm in arms:
                if draw == 0 or arm in TRAINED or not amount.takes_all(labels):
                    cell = Cell(arm, str(amount), count, draw)
                    found.setdefault(cell.name, cell)
    return list(found.values())


class CellStore:
    """Results of cells in a folder: one JSON file each, written when the cell is finished."""

    def __init__(self, folder: Path):
        self.folder = folder

    def file(self, cell: Cell) -> Path:
        return self.folder / f"{cell.name}.json"

    def write(self, result: CellResult) -> None:
        """Commit a result to disk."""
        packed = base64.b64encode(np.packbits(result.right.numpy()).tobytes()).decode()
        record = {
            **asdict(result.cell),
            "top1": result.top1,
            "test_images": len(result.right),
            "right": packed,
            "seconds": result.seconds,
            "settings": result.settings,
        }
        write_text_atomically(self.file(result.cell), json.dumps(record) + "\n")

    def read(self, cell: Cell) -> CellResult | None:
        """The result of a cell; None where there is none, or the file is damaged."""
        try:
            record = json.loads(self.file(cell).read_text())
            bits = np.frombuffer(base64.b64decode(record["right"], validate=True), dtype=np.uint8)
            right = torch.from_numpy(np.unpackbits(bits, count=record["test_images"]).astype(bool))
            if {name: record[name] for name in asdict(cell)} != asdict(cell) or len(right) != record["test_images"]:
                return None
            return CellResult(cell, right, float(record["seconds"]), dict(record["settings"]))
        except (OSError, ValueError, KeyError, TypeError):
            return None
