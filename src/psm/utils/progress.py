"""Progress bars on the terminal, all in one style. Nothing is shown where the output is not a terminal."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

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

FEW_ITEMS = 1_000  # that many are done before a bar could be read

StageBar = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]


def build_progress(*columns: ProgressColumn, shown: bool = True) -> Progress:
    """A transient bar on stderr: title, bar, the given columns and the time left; disabled off a terminal."""
    console = Console(stderr=True)
    layout = (TextColumn("{task.description}"), BarColumn(), *columns, TimeRemainingColumn())
    return Progress(*layout, console=console, transient=True, disable=not (shown and console.is_terminal))


@contextmanager
def counting(title: str, total: int, shown: bool) -> Iterator[Callable[[int], None]]:
    """A bar over a number of items; yields the function that sets how many are done."""
    with _bar(title, total, build_progress(MofNCompleteColumn(), shown=shown and total > FEW_ITEMS)) as update:
        yield update


@contextmanager
def transferring(title: str, total: int | None, shown: bool) -> Iterator[Callable[[int], None]]:
    """A bar over bytes with their rate; yields the function that sets how many have arrived."""
    with _bar(title, total, build_progress(DownloadColumn(), TransferSpeedColumn(), shown=shown)) as update:
        yield update


@contextmanager
def stages(shown: bool) -> Iterator[StageBar]:
    """Bars of several stages, one at a time.

    Yields a function of a stage's title and total; it returns a context manager that yields the function that adds to
    the number done.
    """
    with build_progress(MofNCompleteColumn(), shown=shown) as progress:

        @contextmanager
        def stage(title: str, total: int) -> Iterator[Callable[[int], None]]:
            task = progress.add_task(title, total=total)
            yield lambda count: progress.update(task, advance=count)
            progress.remove_task(task)

        yield stage


@contextmanager
def _bar(title: str, total: int | None, progress: Progress) -> Iterator[Callable[[int], None]]:
    with progress:
        task = progress.add_task(title, total=total)
        yield lambda done: progress.update(task, completed=done)
