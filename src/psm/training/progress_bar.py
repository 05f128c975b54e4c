"""The progress bar: epoch, images a second, time left, loss, nearest-neighbor score."""

import sys
import time
from typing import Any

import lightning
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from psm.training.module import PretrainModule

REFRESH = 0.5  # seconds between looks at the loss: each one waits for the device


class ProgressBar(lightning.Callback):
    """One bar for the whole run on a terminal; elsewhere a line an epoch."""

    def __init__(self, epochs: int, batch_size: int):
        self.epochs, self.batch_size = epochs, batch_size
        self.console: Console | None = None  # made where training runs: it cannot be sent to another process
        self.bar: Progress | None = None
        self.knn = ""

    def on_train_start(self, trainer: lightning.Trainer, module: PretrainModule) -> None:
        self.looked, self.looked_step = time.perf_counter(), trainer.global_step
        if not trainer.is_global_zero:
            return
        self.console = Console(stderr=True)
        if not sys.stderr.isatty():
            return
        self.bar = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[facts]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self.console,
        )
        self.task = self.bar.add_task(
            "epoch", total=self.epochs * module.steps_per_epoch, completed=trainer.global_step, facts=""
        )
        self.bar.start()

    def on_train_batch_end(
        self, trainer: lightning.Trainer, module: PretrainModule, outputs: Any, batch: Any, index: int
    ) -> None:
        now = time.perf_counter()
        if self.bar is None or now - self.looked < REFRESH:
            return
        rate = (trainer.global_step - self.looked_step) * self.batch_size / (now - self.looked)
        self.looked, self.looked_step = now, trainer.global_step
        self.bar.update(
            self.task,
            completed=trainer.global_step,
            description=f"epoch {trainer.current_epoch + 1}/{self.epochs}",
            facts=f"{rate:,.0f} img/s · loss {outputs['loss'].item():.3f}{self.knn}",
        )

    def epoch(self, record: dict[str, Any], left: float) -> None:
        """Take note of a finished epoch; ``left`` seconds remain."""
        if "knn" in record:
            self.knn = f" · kNN {record['knn']:.1f} %"
        if self.bar is not None:
            self.bar.update(self.task, completed=record["step"])
        elif self.console is not None:
            minutes, seconds = divmod(round(left), 60)
            self.console.print(
                f"epoch {record['epoch']}/{self.epochs} · {record['images_per_second']:,.0f} img/s · "
                f"loss {record['loss']:.3f}{self.knn} · {minutes}:{seconds:02d} left",
                highlight=False,
            )

    def close(self) -> None:
        if self.bar is not None:
            self.bar.stop()
            self.bar = None

    def on_train_end(self, trainer: lightning.Trainer, module: PretrainModule) -> None:
        self.close()

    def on_exception(self, trainer: lightning.Trainer, module: PretrainModule, exception: BaseException) -> None:
        self.close()
