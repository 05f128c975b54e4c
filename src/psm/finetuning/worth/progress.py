"""Progress of a comparison: its plan, the cell at work, and the time left from the forward passes to come."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from psm.finetuning.worth.cells import TITLES, Cell, CellResult
from psm.utils.progress import LINE_EVERY, clock_text


class WorthProgress:
    """Counts forward passes. On a terminal a bar; elsewhere a line for each cell, and one every half minute."""

    def __init__(self, cells: int, done: int, passes: int, shown: bool, clock: Callable[[], float] = time.perf_counter):
        """Begin.

        Args:
            cells: of the whole comparison.
            done: cells that were finished by an earlier call.
            passes: forward passes to come.
            shown: False: nothing is shown.
            clock: seconds.
        """
        self.cells, self.done, self.passes, self.shown, self.clock = cells, done, passes, shown, clock
        self.console = Console(stderr=True)
        self.started = self.printed = clock()
        self.passed = 0
        self.title = ""
        terminal = shown and self.console.is_terminal
        columns = (TextColumn("{task.description}"), BarColumn())
        self.bar = Progress(*columns, console=self.console, transient=True) if terminal else None
        self.task = self.bar.add_task("", total=passes) if self.bar else None

    def plan(self, cells: Sequence[Cell], device: str) -> None:
        """Say what is to be done."""
        counts = {title: sum(cell.arm == arm for cell in cells) for arm, title in TITLES.items()}
        kinds = [f"{count} {title}" for title, count in counts.items() if count]
        kept = f", {self.done} of them done" if self.done else ""
        self._print(
            f"{len(cells)} classifiers{kept}: {', '.join(kinds)} · {self.passes / 1e6:.2g} M forward passes on {device}"
        )

    def start(self, cell: Cell) -> None:
        self.title = cell.title
        self._show()

    def advance(self, passes: int) -> None:
        """So many more forward passes are done."""
        self.passed += passes
        self._show()

    def finish(self, result: CellResult) -> None:
        """A cell is finished."""
        self.done += 1
        self._print(f"{result.cell.title}: {result.top1:.1f} % · {self._state()}")

    def left(self) -> float | None:
        """Seconds to go; None before the first passes are done."""
        if not self.passed:
            return None
        return max(0, self.passes - self.passed) * (self.clock() - self.started) / self.passed

    def _state(self) -> str:
        return f"{self.done} of {self.cells} done · {clock_text(self.left())} left"

    def _show(self) -> None:
        if self.bar and self.task is not None:
            self.bar.update(self.task, completed=self.passed, description=f"{self.title} · {self._state()}")
        elif self.clock() - self.printed >= LINE_EVERY:
            self._print(f"{self.title} · {self._state()}")

    def _print(self, line: str) -> None:
        if self.shown:
            self.printed = self.clock()
            self.console.print(line, highlight=False, markup=False, soft_wrap=True)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Show the bar while within."""
        if self.bar is None:
            yield
            return
        with self.bar:
            yield
