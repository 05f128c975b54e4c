"""What psm itself does around the steps: measure and record metrics, then save the checkpoint."""

import logging
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import Checkpoint

from psm.training.health import divergence
from psm.training.measures import Measures
from psm.training.progress_bar import ProgressBar
from psm.training.run_module import RunModule
from psm.utils.errors import Diverged
from psm.utils.files import append_line, read_lines
from psm.utils.run_folder import RunFolder

log = logging.getLogger("psm")


def metric_names(module: RunModule, measures: Measures[Any]) -> list[str]:
    """Every metric that callbacks may monitor, as in metrics.jsonl."""
    return [*measures.names(module), "lr", "images_per_second", "seconds"]


class MetricsCallback(lightning.Callback):
    """Writes metrics.jsonl, sends metrics to the loggers and puts them in ``trainer.callback_metrics``.

    It runs before the user's callbacks, so that these find the epoch's metrics; their names are those of
    metrics.jsonl. Between epochs ``callback_metrics["loss"]`` is the loss of the latest step.
    """

    def __init__(self, run: RunFolder, measures: Measures[Any], bar: ProgressBar | None):
        self.run, self.measures, self.bar = run, measures, bar
        self.history: list[dict[str, Any]] = []
        self.warned: set[str] = set()

    def on_train_start(self, trainer: lightning.Trainer, module: RunModule) -> None:  # type: ignore[override]
        self.history = read_lines(self.run.metrics)
        # A resumed run may start within an epoch, where on_train_epoch_start is not called.
        self.on_train_epoch_start(trainer, module)

    def on_train_epoch_start(self, trainer: lightning.Trainer, module: RunModule) -> None:  # type: ignore[override]
        self.epoch_started, self.epoch_first_step = time.perf_counter(), trainer.global_step

    def on_train_batch_end(  # type: ignore[override]
        self, trainer: lightning.Trainer, module: RunModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        trainer.callback_metrics["loss"] = module.step_metrics["loss"]  # a tensor on the device: no host sync
        step = trainer.global_step
        if step % module.config.monitor.log_every == 0:
            loss = module.epoch_mean.means()["loss"]
            stop_unless_finite(loss, trainer)
            self._send_to_loggers(trainer, {"loss": loss, "lr": module.learning_rate(step - 1)}, step)

    def on_train_epoch_end(self, trainer: lightning.Trainer, module: RunModule) -> None:  # type: ignore[override]
        record = self._measure(trainer, module)
        module.epoch_mean.reset()
        record |= self.measures.score(module, record["epoch"])
        # Times differ between ranks; a callback that stops the run must decide alike on every one.
        record = trainer.strategy.broadcast(record) if trainer.world_size > 1 else record
        self.history.append(record)
        if trainer.is_global_zero:
            append_line(self.run.metrics, record)
            self._report(record)
        self._send_to_loggers(trainer, {k: v for k, v in record.items() if k != "step"}, record["step"])
        # Without "epoch" and "step": callbacks take these from the trainer, which counts epochs from 0.
        metrics = {k: torch.tensor(float(v)) for k, v in record.items() if k not in ("epoch", "step")}
        trainer.callback_metrics.update(metrics)

    def _measure(self, trainer: lightning.Trainer, module: RunModule) -> dict[str, Any]:
        """The epoch's record but for the scores."""
        seconds = time.perf_counter() - self.epoch_started
        steps = trainer.global_step - self.epoch_first_step
        means = module.epoch_mean.means()
        stop_unless_finite(means["loss"], trainer)
        return {
            "epoch": trainer.current_epoch + 1,
            "step": trainer.global_step,
            **self.measures.measure(module, means),
            "lr": module.learning_rate(trainer.global_step - 1),
            "images_per_second": steps * module.config.batch_size / seconds,
            "seconds": seconds,
        }

    def _report(self, record: dict[str, Any]) -> None:
        """Log the record, warn once of each kind of trouble, and show the epoch."""
        log.info("epoch %d: %s", record["epoch"], {k: round(v, 4) for k, v in record.items() if k != "epoch"})
        for sentence in self.measures.warnings(self.history):
            kind = sentence.partition(":")[0]
            if kind not in self.warned:
                log.warning(sentence)
            self.warned.add(kind)
        if self.bar:
            self.bar.show_epoch(record)

    @staticmethod
    def _send_to_loggers(trainer: lightning.Trainer, metrics: Mapping[str, float], step: int) -> None:
        for logger in trainer.loggers:
            logger.log_metrics(dict(metrics), step)


class CheckpointCallback(Checkpoint):
    """Saves last.ckpt and the snapshots.

    As a `Checkpoint` at the end of the list it runs after all other callbacks, so that their states are saved as they
    are after the epoch: a resumed EarlyStopping has counted the epoch that the checkpoint ends with.
    """

    def __init__(self, run: RunFolder):
        self.run = run

    def on_train_batch_end(  # type: ignore[override]
        self, trainer: lightning.Trainer, module: RunModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step, every = trainer.global_step, module.config.save.every_steps
        if every and step % every == 0 and step % module.steps_per_epoch:  # the epoch's end saves anyway
            stop_unless_finite(module.epoch_mean.means()["loss"], trainer)
            self.save(trainer, module)

    def save(self, trainer: lightning.Trainer, module: RunModule) -> None:
        """Replace last.ckpt by the state after the latest step."""
        self._save(trainer, module, self.run.checkpoint)

    def on_train_epoch_end(self, trainer: lightning.Trainer, module: RunModule) -> None:  # type: ignore[override]
        save, epoch = module.config.save, trainer.current_epoch + 1
        if epoch % (save.every_epochs or 1) == 0 or epoch == module.config.epochs or trainer.should_stop:
            self.save(trainer, module)
        if save.snapshots and epoch % save.snapshots == 0:
            self._save(trainer, module, self.run.snapshot(epoch))

    @staticmethod
    def _save(trainer: lightning.Trainer, module: RunModule, path: Path) -> None:
        """Replace the checkpoint, unless a weight is NaN or infinite."""
        norms = torch.stack(torch._foreach_norm([x.detach().float() for x in module.networks.parameters()]))
        if not torch.isfinite(norms.sum()):
            raise Diverged(divergence(math.nan, trainer.current_epoch + 1))
        trainer.save_checkpoint(path)


def stop_unless_finite(loss: float, trainer: lightning.Trainer) -> None:
    """End the run if the loss is NaN or infinite; the last good checkpoint stays."""
    if not math.isfinite(loss):
        raise Diverged(divergence(loss, trainer.current_epoch + 1))
