"""Progress of a suite on the terminal: a line per running run, and one for the suite with the time left.

On a terminal the lines are live; elsewhere a line is printed when a run starts, ends or fails.
"""

import sys
import time
from collections.abc import Sequence
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from psm.experiments.plan import PlannedRun, data_title
from psm.experiments.results import Study
from psm.utils.files import read_lines
from psm.utils.run_folder import RunFolder

REFRESH_SECONDS = 1.0


class SuiteProgress:
    """Counts finished and failed runs, and estimates the time left from the epochs trained since the start."""

    def __init__(self, study: Study, total: int, missing: Sequence[PlannedRun]):
        self.study, self.total = study, total
        self.done, self.failed = total - len(missing), 0
        self.started = time.monotonic()
        self.waiting = {run.name for run in missing}
        self.epochs = {run.name: run.epochs for run in missing}
        self.epochs_before = {run.name: self.epoch(run) for run in missing}  # by a suite that was stopped
        self.epochs_now = dict(self.epochs_before)
        self.running: dict[str, tuple[PlannedRun, str]] = {}  # with the node that works on it

    def metrics(self, run: PlannedRun) -> list[dict[str, Any]]:
        """The metrics of a run, an entry per epoch."""
        return read_lines(RunFolder(self.study.run(run.name)).metrics)

    def epoch(self, run: PlannedRun) -> int:
        """The last finished epoch of a run."""
        metrics = self.metrics(run)
        return int(metrics[-1].get("epoch", 0)) if metrics else 0

    def finish(self, run: PlannedRun, succeeded: bool) -> None:
        """Count a run; the epochs that a failed run did not reach are no longer waited for."""
        self.running.pop(run.name, None)
        if run.name not in self.waiting:  # it was counted, and has scored the baselines once more
            return
        self.waiting.remove(run.name)
        self.done += succeeded
        self.failed += not succeeded
        self.epochs_now[run.name] = self.epochs[run.name]
        if not succeeded:
            self.epochs_before[run.name] = self.epochs[run.name]

    def seconds_left(self) -> float | None:
        """Estimated seconds until all runs are done; None before the first epoch."""
        for run, _ in self.running.values():
            self.epochs_now[run.name] = self.epoch(run)
        trained = sum(self.epochs_now.values()) - sum(self.epochs_before.values())
        waiting = sum(self.epochs.values()) - sum(self.epochs_now.values())
        if trained <= 0:
            return None
        return waiting * (time.monotonic() - self.started) / trained


class Display:
    """Shows a suite's progress on stderr, as a context manager."""

    def __init__(self, progress: SuiteProgress, where: str, live: bool):
        """Args:
        progress: what is shown.
        where: the runs work, and how many at a time.
        live: show the running runs, if stderr is a terminal.
        """
        self.progress, self.where = progress, where
        self.console = Console(stderr=True, highlight=False)
        self.live = Live(console=self.console, refresh_per_second=4) if live and sys.stderr.isatty() else None
        self.refreshed = 0.0

    def __enter__(self) -> "Display":
        if self.live:
            self.live.start()
        done, total = self.progress.done, self.progress.total
        self.print(f"{total} runs: {done} finished before, {total - done} to do{self.where and f', {self.where}'}")
        return self

    def __exit__(self, *error: object) -> None:
        if self.live:
            self.live.update(Text(""))
            self.live.stop()

    def print(self, line: str) -> None:
        self.console.print(line, soft_wrap=True, markup=False)

    def run_started(self, run: PlannedRun, node: str = "") -> None:
        self.progress.running[run.name] = (run, node)
        epoch = self.progress.epoch(run)
        resumed = f" from epoch {epoch}" if epoch else ""
        if not self.live:
            self.print(f"starts {run_label(run)}{resumed}{f' on {node}' if node else ''}")

    def run_lost(self, run: PlannedRun, node: str, reason: str) -> None:
        self.progress.running.pop(run.name, None)
        place = f" on {node}" if node else ""
        self.print(f"LOST   {run_label(run)}{place}: {reason}; goes on elsewhere from epoch {self.progress.epoch(run)}")

    def run_finished(self, run: PlannedRun) -> None:
        self.progress.finish(run, succeeded=True)
        self.print(f"done   {run_label(run)} · {self._suite_line()}")

    def run_failed(self, run: PlannedRun, reason: str) -> None:
        self.progress.finish(run, succeeded=False)
        self.print(f"FAILED {run_label(run)}: {reason} (log: {self.progress.study.log(run.name)})")

    def refresh(self) -> None:
        """Update the live lines, at most once per second."""
        now = time.monotonic()
        if self.live and now - self.refreshed > REFRESH_SECONDS:
            self.refreshed = now
            self.live.update(self._live_lines())

    def _suite_line(self) -> str:
        progress = self.progress
        left = progress.seconds_left()
        failed = f", {progress.failed} failed" if progress.failed else ""
        time_left = f" · {format_duration(left)} left" if left else ""
        return f"{progress.done} of {progress.total} runs{failed}{time_left}"

    def _live_lines(self) -> Group:
        progress = self.progress
        grid = Table.grid(padding=(0, 2))
        for run, node in progress.running.values():
            metrics = progress.metrics(run)
            epoch = int(metrics[-1].get("epoch", 0)) if metrics else 0
            rate = f"{metrics[-1]['images_per_second']:,.0f} img/s" if epoch else ""
            state = f"epoch {epoch}/{run.epochs}" if epoch < run.epochs else "scoring"
            grid.add_row(run_label(run), ProgressBar(run.epochs, epoch, width=20), state, rate, node)
        return Group(
            grid,
            Text.assemble((self._suite_line(), "bold")),
            ProgressBar(max(1, progress.total), progress.done + progress.failed),
        )


def run_label(run: PlannedRun) -> str:
    """Title, data set and seed of a run."""
    return f"{run.title} · {data_title(run.data)} · seed {run.seed}"


def format_duration(seconds: float) -> str:
    """``45 s``, ``12 min`` or ``3 h 20 min``."""
    minutes = round(seconds / 60)
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02d} min"
