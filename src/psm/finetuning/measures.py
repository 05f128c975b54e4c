"""What is measured at the end of an epoch of fine-tuning, and the checkpoint of the best one."""

from collections.abc import Sequence
from typing import Any

import lightning
from lightning.pytorch.callbacks import Checkpoint
from torch.nn.functional import cross_entropy

from psm.evaluation.accuracy import topk_accuracy
from psm.finetuning.module import FinetuneModule
from psm.utils.run_folder import RunFolder

ACCURACY, LOSS = "validation", "validation_loss"


class FinetuneMeasures:
    """Loss and accuracy on the training views, and on the validation images where there are any."""

    def names(self, module: FinetuneModule) -> list[str]:
        return [*module.epoch_mean.names, *([ACCURACY, LOSS] if module.validation is not None else [])]

    def measure(self, module: FinetuneModule, means: dict[str, float]) -> dict[str, Any]:
        return dict(means)

    def score(self, module: FinetuneModule, epoch: int) -> dict[str, float]:
        if module.validation is None:
            return {}
        logits, labels = module.validation_logits()
        return {ACCURACY: topk_accuracy(logits, labels).top1, LOSS: cross_entropy(logits, labels).item()}

    def warnings(self, history: Sequence[dict[str, Any]]) -> list[str]:
        return []


class BestCheckpoint(Checkpoint):
    """Keeps best.ckpt: the weights of the epoch with the highest validation accuracy, of equals the lowest loss.

    It runs before last.ckpt is written, which holds what it knows: a run that is killed between the two repeats the
    epoch, and the file, to the same bits.
    """

    def __init__(self, run: RunFolder):
        self.run = run
        self.best: tuple[float, float] | None = None  # accuracy and loss
        self.epoch = 0

    def on_train_epoch_end(self, trainer: lightning.Trainer, module: FinetuneModule) -> None:  # type: ignore[override]
        metrics = trainer.callback_metrics
        now = (metrics[ACCURACY].item(), metrics[LOSS].item())
        if self.best is None or (now[0], -now[1]) > (self.best[0], -self.best[1]):
            self.best, self.epoch = now, trainer.current_epoch + 1
            trainer.save_checkpoint(self.run.best, weights_only=True)

    def state_dict(self) -> dict[str, Any]:
        return {"best": None if self.best is None else list(self.best), "epoch": self.epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best = None if state["best"] is None else (state["best"][0], state["best"][1])
        self.epoch = state["epoch"]
