"""What a suite shows while it works: a line for each running run, one for all with the time left.

On a terminal the lines are live; elsewhere a line is printed when a run starts, ends or fails.
"""

import sys
import time
from collections.abc import Sequence

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from psm.experiments.plan import PlannedRun, data_title
from psm.experiments.results import Study
from psm.utils.files import read_lines
from psm.utils.run_folder import RunFolder


class Progress:
    """How far a suite is. Time is guessed from the epochs that were trained since it started."""

    def __init__(self, study: Study, total: int, missing: Sequence[PlannedRun], jobs: int):
        self.study, self.total, self.jobs = study, total, jobs
        self.done, self.failed = total - len(missing), 0
        self.started = time.monotonic()
        self.epochs = {run.run: run.epochs for run in missing}
        self.before = {run.run: self.epoch(run) for run in missing}  # trained earlier, by a suite that was stopped
        self.now = dict(self.before)
        self.running: list[PlannedRun] = []

    def records(self, run: PlannedRun) -> list[dict]:
        return read_lines(RunFolder(self.study.run(run.run)).metrics)

    def epoch(self, run: PlannedRun) -> int:
        records = self.records(run)
        return int(records[-1].get("epoch", 0)) if records else 0

    def ended(self, run: PlannedRun, well: bool) -> None:
        """Count a run; whatever it did not reach is no longer waited for."""
        self.running = [other for other in self.running if other.run != run.run]
        self.done += well
        self.failed += not well
        self.now[run.run] = self.epochs[run.run]
        if not well:
            self.before[run.run] = self.epochs[run.run]

    def left(self) -> float | None:
        """Seconds until all is done, or None before anything was learned about it."""
        for run in self.running:
            self.now[run.run] = self.epoch(run)
        trained = sum(self.now.values()) - sum(self.before.values())
        waiting = sum(self.epochs.values()) - sum(self.now.values())
        if trained <= 0:
            return None
        return waiting * (time.monotonic() - self.started) / trained


class Display:
    """Shows a suite's progress on stderr while it is entered."""

    def __init__(self, progress: Progress, lively: bool):
        self.progress = progress
        self.console = Console(stderr=True, highlight=False)
        self.live = Live(console=self.console, refresh_per_second=4) if lively and sys.stderr.isatty() else None
        self.looked = 0.0

    def __enter__(self) -> "Display":
        if self.live:
            self.live.start()
        progress = self.progress
        waiting = progress.total - progress.done
        self.say(f"{progress.total} runs: {progress.done} finished before, {waiting} to do, {progress.jobs} at a time")
        return self

    def __exit__(self, *error: object) -> None:
        if self.live:
            self.live.update(Text(""))
            self.live.stop()

    def say(self, line: str) -> None:
        self.console.print(line, soft_wrap=True, markup=False)

    def started(self, run: PlannedRun) -> None:
        self.progress.running.append(run)
        epoch = self.progress.epoch(run)
        again = f" from epoch {epoch}" if epoch else ""
        if not self.live:
            self.say(f"starts {named(run)}{again}")

    def finished(self, run: PlannedRun) -> None:
        self.progress.ended(run, well=True)
        self.say(f"done   {named(run)} · {self._overall()}")

    def failed(self, run: PlannedRun, reason: str) -> None:
        self.progress.ended(run, well=False)
        self.say(f"FAILED {named(run)}: {reason} (log: {self.progress.study.log(run.run)})")

    def look(self) -> None:
        """Refresh the live lines, once a second at most."""
        now = time.monotonic()
        if self.live and now - self.looked > 1:
            self.looked = now
            self.live.update(self._lines())

    def _overall(self) -> str:
        progress = self.progress
        left = progress.left()
        failed = f", {progress.failed} failed" if progress.failed else ""
        return f"{progress.done} of {progress.total} runs{failed}" + (f" · {duration(left)} left" if left else "")

    def _lines(self) -> Group:
        progress = self.progress
        grid = Table.grid(padding=(0, 2))
        for run in progress.running:
            records = progress.records(run)
            epoch = int(records[-1].get("epoch", 0)) if records else 0
            rate = f"{records[-1]['images_per_second']:,.0f} img/s" if epoch else ""
            state = f"epoch {epoch}/{run.epochs}" if epoch < run.epochs else "scoring"
            grid.add_row(named(run), ProgressBar(run.epochs, epoch, width=20), state, rate)
        return Group(
            grid,
            Text.assemble((self._overall(), "bold")),
            ProgressBar(max(1, progress.total), progress.done + progress.failed),
        )


def named(run: PlannedRun) -> str:
    """A run in a few words."""
    return f"{run.title} · {data_title(run.data)} · seed {run.seed}"


def duration(seconds: float) -> str:
    """Time as people say it: 45 s, 12 min, 3 h 20 min."""
    minutes = round(seconds / 60)
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02d} min"
