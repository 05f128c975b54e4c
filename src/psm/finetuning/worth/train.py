"""One cell: train or fit its classifier on the labeled images, and look which test images it gets right."""

import copy
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning
from torch import Tensor, nn

from psm.config.stored import load_finetune_config
from psm.config.worth import WorthConfig
from psm.data import ImageDataset, ImageStore
from psm.embedding.encoder import LoadedEncoder
from psm.evaluation.features import check_finite_features, extract
from psm.evaluation.few_labels import LabelAmount, draw_labeled
from psm.evaluation.knn import knn_scores
from psm.evaluation.logistic import choose_c, fit_logistic
from psm.finetuning.finetune import run_finetuning
from psm.finetuning.worth.cells import Cell, CellResult
from psm.models.encoder import unwrapped
from psm.models.pretrained import CUSTOM
from psm.utils.run_folder import RunFolder

FORWARD, BACKWARD = 1, 2  # cost of an image, in forward passes

CHECKPOINTS = 10  # of a training, at most

Advance = Callable[[int], None]  # adds to the forward passes that are done
Scored = tuple[Tensor, dict[str, Any]]  # class scores (test images, classes), and what was chosen for them


@dataclass(frozen=True)
class Labeled:
    """The data of a comparison: training images that may be labeled, and test images."""

    name: str
    train: ImageStore
    test: ImageStore
    classes: tuple[str, ...]

    @property
    def train_labels(self) -> Tensor:
        assert self.train.labels is not None
        return self.train.labels

    @property
    def test_labels(self) -> Tensor:
        assert self.test.labels is not None
        return self.test.labels


def epochs_of(cell: Cell, config: WorthConfig) -> int:
    """How often a network sees its labeled images: as often as is set, or more where that makes too few steps."""
    group = config.scratch if cell.arm == "scratch" else config.finetune
    steps_per_epoch = cell.labels // min(config.batch_size, cell.labels)
    return max(group.epochs, -(-config.steps // steps_per_epoch))


def cost(cell: Cell, config: WorthConfig, test_images: int) -> int:
    """Forward passes of one image that a cell takes, about; what frozen features take is counted once, elsewhere."""
    if cell.arm in ("knn", "logistic"):
        return 0
    batch = min(config.batch_size, cell.labels)
    seen = epochs_of(cell, config) * (cell.labels // batch) * batch
    return (FORWARD + BACKWARD) * seen + test_images


class FrozenFeatures:
    """Features of all training and test images, computed when they are first asked for."""

    def __init__(self, encoder: LoadedEncoder, data: Labeled):
        self.encoder, self.data = encoder, data
        self._found: tuple[Tensor, Tensor] | None = None

    @property
    def passes(self) -> int:
        """Forward passes that are needed to have them."""
        return 0 if self._found else len(self.data.train) + len(self.data.test)

    def __call__(self, advance: Advance) -> tuple[Tensor, Tensor]:
        """Features of the training images (N, F) and of the test images (M, F)."""
        if self._found is None:
            train, test = (
                extract(
                    self.encoder.module,
                    images,
                    self.encoder.views,
                    precision=self.encoder.precision,
                    advance=advance,
                )
                for images in (self.data.train, self.data.test)
            )
            source = f"checkpoint={self.encoder.file}"
            self._found = check_finite_features(train, source), check_finite_features(test, source)
        return self._found


@dataclass(frozen=True)
class CellMaker:
    """Computes cells.

    Args:
        config: how networks are trained and neighbors vote.
        encoder: the pretrained one.
        data: training and test images.
        features: of the frozen encoder.
        amounts: of labels, by the name that a cell has for them.
        runs: folder for trainings that are under way; a cell that was interrupted goes on from there.
    """

    config: WorthConfig
    encoder: LoadedEncoder
    data: Labeled
    features: FrozenFeatures
    amounts: Mapping[str, LabelAmount]
    runs: Path

    def __call__(self, cell: Cell, advance: Advance) -> CellResult:
        """Train or fit the classifier of a cell, and look which test images it gets right."""
        started = time.perf_counter()
        rows = draw_labeled(self.data.train_labels, self.amounts[cell.amount], self.config.seed, cell.draw)
        scores, chosen = _ARMS[cell.arm](self, cell, rows, advance)
        right = scores.argmax(1).cpu() == self.data.test_labels
        return CellResult(cell, right, time.perf_counter() - started, chosen)

    def knn(self, cell: Cell, rows: Tensor, advance: Advance) -> Scored:
        """Votes of the nearest labeled images."""
        train, test = self.features(advance)
        labels, temperature, k = self.data.train_labels[rows], self.config.temperature, min(self.config.k, len(rows))
        votes = knn_scores(train[rows], labels, test, len(self.data.classes), k, temperature)
        return votes, {"k": k, "temperature": temperature}

    def logistic(self, cell: Cell, rows: Tensor, advance: Advance) -> Scored:
        """Logits of a logistic regression, whose C is chosen on the labeled images."""
        train, test = self.features(advance)
        classes, labels = len(self.data.classes), self.data.train_labels[rows]
        chosen = choose_c(train[rows], labels, classes)
        return fit_logistic(train[rows], labels, classes, chosen.c)(test), {"C": chosen.c}

    def scratch(self, cell: Cell, rows: Tensor, advance: Advance) -> Scored:
        """Logits of a network with random weights that was trained on the labeled images."""
        group, info = self.config.scratch, self.encoder.info
        start = {"checkpoint": "none", "encoder": info.encoder, "stem": _stem(info.encoder, info.stem)}
        return self._trained(cell, rows, advance, start, group.lr, group.weight_decay, 1.0)

    def finetune(self, cell: Cell, rows: Tensor, advance: Advance) -> Scored:
        """Logits of the pretrained network, trained further on the labeled images."""
        group = self.config.finetune
        start = {"checkpoint": str(self.encoder.file)}
        return self._trained(cell, rows, advance, start, group.lr, group.weight_decay, group.layer_decay)

    def _trained(
        self,
        cell: Cell,
        rows: Tensor,
        advance: Advance,
        start: Mapping[str, Any],
        lr: float,
        weight_decay: float,
        layer_decay: float,
    ) -> Scored:
        """Logits of a network that `psm finetune` trains on the labeled images, all of them, to its last epoch."""
        config, epochs = self.config, epochs_of(cell, self.config)
        batch_size = min(config.batch_size, len(rows))
        labeled = ImageDataset(self.data.name, self.data.train.select(rows), None, self.data.classes)
        out = self.runs / cell.name
        keys = {
            **start,
            "out": str(out),
            "resume": "auto",
            "data": self.data.name,
            "validation": 0,
            "epochs": epochs,
            "batch_size": batch_size,
            "label_smoothing": config.label_smoothing,
            "layer_decay": layer_decay,
            "seed": config.seed + cell.draw,
            "optim": {"lr": lr, "weight_decay": weight_decay},
            "views": config.views,
            "accelerator": config.accelerator,
            "devices": "1",
            "precision": config.precision,
            "save": {"every_epochs": max(1, epochs // CHECKPOINTS)},
            "progress": False,
        }
        begun = RunFolder(out)
        if begun.config.exists() and load_finetune_config(begun).checkpoint != keys["checkpoint"]:
            shutil.rmtree(out)  # the encoder has moved since: the training starts anew
        run = run_finetuning(keys, data=labeled, encoder=self._own_network(), callbacks=[_Passes(advance, batch_size)])
        logits = extract(run.classifier, self.data.test, run.views, advance=advance)
        shutil.rmtree(out)
        return logits, {"epochs": epochs, "lr": lr, "loss": run.metrics[-1]["loss"]}

    def _own_network(self) -> nn.Module | None:
        """A copy of a network of the user's own, which has no name to be built by."""
        return copy.deepcopy(unwrapped(self.encoder.module)) if self.encoder.info.encoder == CUSTOM else None


_ARMS = {
    "scratch": CellMaker.scratch,
    "knn": CellMaker.knn,
    "logistic": CellMaker.logistic,
    "finetune": CellMaker.finetune,
}


class _Passes(lightning.Callback):
    """Tells how many images a training has seen."""

    def __init__(self, advance: Advance, batch_size: int):
        self.advance, self.batch_size = advance, batch_size

    def on_train_batch_end(self, trainer: lightning.Trainer, *_: Any) -> None:
        self.advance((FORWARD + BACKWARD) * self.batch_size)


def _stem(encoder: str, stem: str) -> str:
    """The stem to build a network of this name with: models of libraries have their own."""
    return "auto" if "/" in encoder else stem
