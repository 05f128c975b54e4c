"""Progress bars on the terminal: one for counts, one for bytes. Nothing is drawn where nobody looks."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

_FEW = 1_000  # a set this small is ready before a bar could be read


@contextmanager
def counting(title: str, total: int, shown: bool) -> Iterator[Callable[[int], None]]:
    """A bar over so many things; yields the function that sets how many are done."""
    with _bar(title, total, shown and total > _FEW, MofNCompleteColumn()) as update:
        yield update


@contextmanager
def transferring(title: str, total: int | None, shown: bool) -> Iterator[Callable[[int], None]]:
    """A bar over bytes with their rate; yields the function that sets how many have arrived."""
    with _bar(title, total, shown, DownloadColumn(), TransferSpeedColumn()) as update:
        yield update


@contextmanager
def _bar(title: str, total: int | None, shown: bool, *columns: ProgressColumn) -> Iterator[Callable[[int], None]]:
    console = Console(stderr=True)
    layout = (TextColumn("{task.description}"), BarColumn(), *columns, TimeRemainingColumn())
    with Progress(*layout, console=console, transient=True, disable=not (shown and console.is_terminal)) as progress:
        task = progress.add_task(title, total=total)
        yield lambda done: progress.update(task, completed=done)
