"""Progress of a run: its plan, one line with loss and time left, and how long it will take."""

import logging
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import lightning
from rich.console import Console
from rich.progress import Progress, ProgressColumn, Task
from rich.text import Text

from psm.training.plan import forecast, make_plan
from psm.training.run_module import RunModule
from psm.training.step_timer import StepTimer
from psm.utils.progress import clock_text

log = logging.getLogger("psm")

REFRESH = 0.5  # seconds between looks at the loss on a terminal: each one waits for the device
LINE_EVERY = 28.0  # seconds between lines without a terminal; with POLL it stays below half a minute
POLL = 1.0
FORECAST_STEPS, FORECAST_SECONDS = 3, 20.0  # timed before the forecast is shown, whichever comes first
_SHORTEST_BAR = 10
# What a narrow line leaves out, in this order. The time left stays whatever the width.
_DROP_ORDER = ("rate", "step", "chance", "linear", "knn", "validation", "loss", "epoch")


@dataclass(frozen=True)
class Status:
    """What the progress line shows."""

    epoch: int
    epochs: int
    step: int
    steps: int
    left: float | None  # seconds; None before the second step is done
    rate: float | None = None  # images per second
    loss: float | None = None
    chance: float | None = None  # the loss of guessing among all candidates; it grows as the bank fills
    knn: float | None = None  # top-1 in percent
    linear: float | None = None  # top-1 in percent, of the online probe
    validation: float | None = None  # top-1 in percent


def progress_line(status: Status, width: int | None = None) -> str:
    """One line of progress, shortened to ``width`` columns."""
    dropped: set[str] = set()
    for name in (None, *_DROP_ORDER):
        dropped.add(name or "")
        line = " · ".join(_parts(status, dropped))
        if width is None or len(line) <= width:
            break
    return line


def _parts(status: Status, dropped: set[str]) -> list[str]:
    loss = f"loss {status.loss:.3f}" if status.loss is not None else None
    if loss and status.chance is not None and "chance" not in dropped:
        loss += f" (chance {status.chance:.3f})"
    parts = {
        "epoch": f"epoch {status.epoch}/{status.epochs}",
        "step": f"step {status.step:,}/{status.steps:,}",
        "rate": f"{status.rate:,.0f} img/s" if status.rate is not None else None,
        "loss": loss,
        "knn": f"kNN {status.knn:.1f} %" if status.knn is not None else None,
        "linear": f"linear {status.linear:.1f} %" if status.linear is not None else None,
        "validation": f"validation {status.validation:.1f} %" if status.validation is not None else None,
        "left": f"{clock_text(status.left)} left",
    }
    return [text for name, text in parts.items() if text and name not in dropped]


class ProgressBar(lightning.Callback):
    """A bar on a terminal; elsewhere a line at each epoch and at least every half minute.

    Plan and forecast also go to the run's log; with ``shown=False`` nothing else does.
    """

    def __init__(
        self,
        shown: bool = True,
        clock: Callable[[], float] = time.perf_counter,
        console: Console | None = None,  # by default made where training runs: it cannot be sent to another process
        notes: Sequence[str] = (),  # lines to show below the plan
    ):
        self.shown, self.clock, self.console, self.notes = shown, clock, console, list(notes)
        self.bar: Progress | None = None
        self.heartbeat: _Heartbeat | None = None
        self.scores: dict[str, float] = {}  # the latest ones
        self.loss: dict[str, float] = {}
        self.forecast_shown = False

    def on_train_start(self, trainer: lightning.Trainer, module: RunModule) -> None:  # type: ignore[override]
        if not trainer.is_global_zero:
            return
        self.module = module
        self.epoch, self.device = trainer.current_epoch + 1, trainer.strategy.root_device.type
        self.timer = StepTimer(module.total_steps, module.steps_per_epoch, self.clock)
        self.timer.start(trainer.global_step)
        self.looked = self.printed = self.clock()
        if self.shown and self.console is None:
            self.console = Console(stderr=True)
        self._say([*make_plan(trainer, module).lines(), *self.notes])
        if not self.shown:
            return
        if sys.stderr.isatty():
            self.bar = Progress(_LineColumn(self), console=self.console)
            self.task = self.bar.add_task("", total=module.total_steps, completed=trainer.global_step)
            self.bar.start()
        else:
            self.heartbeat = _Heartbeat(self.print_if_due)

    def on_train_epoch_start(self, trainer: lightning.Trainer, module: RunModule) -> None:  # type: ignore[override]
        if trainer.is_global_zero:
            self.epoch = trainer.current_epoch + 1
            self.timer.start_epoch()

    def on_train_batch_end(  # type: ignore[override]
        self, trainer: lightning.Trainer, module: RunModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not trainer.is_global_zero:
            return
        self.timer.end_step(trainer.global_step)
        self._forecast_once()
        if self.bar is not None and self.clock() - self.looked >= REFRESH:
            self.looked = self.clock()
            self._look_at_loss()
            self.bar.update(self.task, completed=trainer.global_step)

    def show_epoch(self, record: dict[str, Any]) -> None:
        """Show a finished epoch's means."""
        self.scores |= {name: record[name] for name in ("knn", "linear", "validation") if name in record}
        self.loss = {name: record[name] for name in ("loss", "chance") if name in record}
        if self.bar is not None:
            self.bar.update(self.task, completed=record["step"])
        elif self.shown:
            self._print(progress_line(self.status(record["images_per_second"])))

    def status(self, rate: float | None = None) -> Status:
        """The run as it is now; waits for nothing."""
        timer, config = self.timer, self.module.config
        if rate is None and timer.seconds_per_step:
            rate = config.batch_size / timer.seconds_per_step
        return Status(
            epoch=self.epoch,
            epochs=config.epochs,
            step=timer.step,
            steps=timer.total_steps,
            left=timer.left(),
            rate=rate,
            loss=self.loss.get("loss"),
            chance=self.loss.get("chance"),
            **self.scores,
        )

    def print_if_due(self) -> None:
        """Without a terminal: print a line if none was printed for nearly half a minute. Runs in its own thread."""
        if self.clock() - self.printed < LINE_EVERY:
            return
        self._look_at_loss()
        self._print(progress_line(self.status()))

    def _look_at_loss(self) -> None:
        """Read the latest step's loss and chance from the device."""
        metrics = self.module.step_metrics
        self.loss = {name: metrics[name].item() for name in ("loss", "chance") if name in metrics}

    def _forecast_once(self) -> None:
        timer = self.timer
        enough = timer.timed >= FORECAST_STEPS or timer.timed_seconds >= FORECAST_SECONDS
        if self.forecast_shown or not enough or timer.seconds_per_step is None:
            return
        self.forecast_shown = True
        self._say(forecast(timer.left() or 0.0, timer.seconds_per_step, self.module, self.device))

    def _say(self, lines: list[str]) -> None:
        """To the log, and to the terminal if progress is shown."""
        for line in lines:
            log.info(line)
            if self.shown:
                self._print(line)

    def _print(self, line: str) -> None:
        self.printed = self.clock()
        if self.console is not None:
            self.console.print(line, highlight=False, markup=False, soft_wrap=True)

    def close(self) -> None:
        """Remove the bar or stop the thread."""
        if self.bar is not None:
            self.bar.stop()
            self.bar = None
        if self.heartbeat is not None:
            self.heartbeat.stop()
            self.heartbeat = None

    def on_train_end(self, trainer: lightning.Trainer, module: RunModule) -> None:  # type: ignore[override]
        self.close()

    def on_exception(self, trainer: lightning.Trainer, module: RunModule, exception: BaseException) -> None:  # type: ignore[override]
        self.close()


class _LineColumn(ProgressColumn):
    """The progress line, with a bar where the terminal is wide enough."""

    def __init__(self, progress: ProgressBar):
        super().__init__()
        self.progress = progress

    def render(self, task: Task) -> Text:
        width = self.progress.console.width if self.progress.console else 80
        line = progress_line(self.progress.status(), width)
        bar = min(40, width - len(line) - 1)
        if bar < _SHORTEST_BAR:
            return Text(line, no_wrap=True)
        done = round(bar * task.completed / max(1, task.total or 1))
        return Text.assemble(("━" * done, "bar.complete"), ("━" * (bar - done), "bar.back"), " ", line, no_wrap=True)


class _Heartbeat:
    """Calls a function every second in a thread of its own, until stopped."""

    def __init__(self, beat: Callable[[], None]):
        self._stopped = threading.Event()
        self._beat = beat
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stopped.wait(POLL):
            self._beat()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join(timeout=2 * POLL)
