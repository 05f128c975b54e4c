"""What happens after an epoch: it is measured, judged, written down, and then the checkpoint is replaced."""

import logging
import math
import time
from pathlib import Path
from typing import Any

import lightning
import torch

from psm.config.schema import KnnConfig
from psm.data import ImageDataset
from psm.evaluation.features import extract
from psm.evaluation.knn import knn_accuracy
from psm.mining.purity import finalize
from psm.training.health import feature_health, in_words
from psm.training.module import PretrainModule
from psm.training.progress_bar import ProgressBar
from psm.utils.errors import Diverged
from psm.utils.run_folder import RunFolder, append_line, read_lines

log = logging.getLogger("psm")


class MetricsCallback(lightning.Callback):
    """Owns metrics.jsonl and the moments at which checkpoints are written."""

    def __init__(self, run: RunFolder, data: ImageDataset, bar: ProgressBar | None):
        self.run, self.data, self.bar = run, data, bar
        self.history: list[dict[str, Any]] = []
        self.said: set[str] = set()

    def on_train_start(self, trainer: lightning.Trainer, module: PretrainModule) -> None:
        self.history = read_lines(self.run.metrics)
        self.started, self.first_step = time.perf_counter(), trainer.global_step
        self.epoch_started, self.epoch_step = self.started, self.first_step  # a resume may start within an epoch

    def on_train_epoch_start(self, trainer: lightning.Trainer, module: PretrainModule) -> None:
        self.epoch_started, self.epoch_step = time.perf_counter(), trainer.global_step

    def on_train_batch_end(
        self, trainer: lightning.Trainer, module: PretrainModule, outputs: Any, batch: Any, index: int
    ) -> None:
        step, config = trainer.global_step, module.config
        save = config.save.every_steps and step % config.save.every_steps == 0 and step % module.steps_per_epoch
        if step % config.monitor.log_every == 0 or save:
            means = module.meter.means()
            self._stop_unless_finite(means["loss"], trainer)
            self._send(trainer, {"loss": means["loss"], "lr": module.learning_rate(step - 1)}, step)
        if save:
            self._save(trainer, module, self.run.checkpoint)

    def on_train_epoch_end(self, trainer: lightning.Trainer, module: PretrainModule) -> None:
        seconds = time.perf_counter() - self.epoch_started
        steps = trainer.global_step - self.epoch_step
        means = module.meter.means()
        self._stop_unless_finite(means["loss"], trainer)
        record = {
            "epoch": trainer.current_epoch + 1,
            "step": trainer.global_step,
            **finalize(means),
            "lr": module.learning_rate(trainer.global_step - 1),
            **feature_health(module.latest.features, module.latest.projection),
            "images_per_second": steps * module.config.batch_size / seconds,
            "seconds": seconds,
        }
        module.meter.reset()
        if trainer.is_global_zero and self._knn_due(record["epoch"], module):
            record["knn"] = self._knn(module)
        self.history.append(record)
        if trainer.is_global_zero:
            append_line(self.run.metrics, record)
            self._speak(record, trainer, module)
        self._send(trainer, {name: value for name, value in record.items() if name != "step"}, record["step"])
        self._save(trainer, module, self.run.checkpoint)
        every = module.config.save.snapshots
        if every and record["epoch"] % every == 0:
            self._save(trainer, module, self.run.snapshot(record["epoch"]))

    @staticmethod
    def _save(trainer: lightning.Trainer, module: PretrainModule, path: Path) -> None:
        """Replace the checkpoint, but never by one that is no longer made of numbers."""
        norms = torch.stack(torch._foreach_norm([x.detach().float() for x in module.networks.parameters()]))
        if not torch.isfinite(norms.sum()):
            raise Diverged(in_words([{"loss": math.nan, "epoch": trainer.current_epoch + 1}])[0])
        trainer.save_checkpoint(path)

    def _speak(self, record: dict[str, Any], trainer: lightning.Trainer, module: PretrainModule) -> None:
        log.info("epoch %d: %s", record["epoch"], {k: round(v, 4) for k, v in record.items() if k != "epoch"})
        for sentence in in_words(self.history):
            kind = sentence.partition(":")[0]
            if kind not in self.said:
                log.warning(sentence)
            self.said.add(kind)
        if self.bar:
            done = trainer.global_step - self.first_step
            total = module.config.epochs * module.steps_per_epoch
            self.bar.epoch(record, (total - trainer.global_step) * (time.perf_counter() - self.started) / max(1, done))

    def _knn_due(self, epoch: int, module: PretrainModule) -> bool:
        monitor = module.config.monitor
        due = epoch % monitor.every == 0 or epoch == module.config.epochs
        return monitor.knn and self.data.test is not None and due

    def _knn(self, module: PretrainModule) -> float:
        """Top-1 of evenly spaced training and test images, in per cent."""
        monitor = module.config.monitor
        parts = []
        for images, most in ((self.data.train, monitor.images), (self.data.test, monitor.test_images)):
            indices = torch.linspace(0, len(images) - 1, min(most, len(images))).long()
            parts += [extract(module.networks.encoder, images, module.views, indices), images.labels[indices]]
        return knn_accuracy(*parts, classes=len(self.data.classes), config=KnnConfig()).top1

    @staticmethod
    def _stop_unless_finite(loss: float, trainer: lightning.Trainer) -> None:
        if not math.isfinite(loss):
            raise Diverged(in_words([{"loss": loss, "epoch": trainer.current_epoch + 1}])[0])

    @staticmethod
    def _send(trainer: lightning.Trainer, metrics: dict[str, float], step: int) -> None:
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step)
