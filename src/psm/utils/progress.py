"""Progress bars on the terminal, all in one style. Off a terminal nothing is shown, or a line now and then."""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.text import Text

FEW_ITEMS = 1_000  # that many are done before a bar could be read
LINE_EVERY = 28.0  # seconds between lines off a terminal

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
def counting_images(title: str, total: int, shown: bool, done: int = 0) -> Iterator[Callable[[int], None]]:
    """A bar over images with their rate; off a terminal a line every half minute.

    Args:
        title: of the bar.
        total: number of images.
        shown: False: nothing is shown.
        done: images that were done before, by an earlier process.

    Yields:
        The function that sets how many are done.
    """
    progress = build_progress(MofNCompleteColumn(), _RateColumn(), shown=shown)
    if progress.disable:
        yield _lines(title, total, done) if shown else lambda count: None
        return
    with progress:
        task = progress.add_task(title, total=total, completed=done)
        yield lambda count: progress.update(task, completed=count)


def _lines(title: str, total: int, before: int) -> Callable[[int], None]:
    """A function that prints how many are done, the rate and the time left, if nothing was printed for a while."""
    console = Console(stderr=True)
    started = printed = time.perf_counter()

    def update(done: int) -> None:
        nonlocal printed
        now = time.perf_counter()
        if now - printed < LINE_EVERY or done <= before:
            return
        printed, rate = now, (done - before) / (now - started)
        left = clock_text((total - done) / rate)
        line = f"{title}: {done:,} of {total:,} images · {rate:,.0f} img/s · {left} left"
        console.print(line, highlight=False, markup=False, soft_wrap=True)

    return update


def clock_text(seconds: float | None) -> str:
    """Seconds as m:ss or h:mm:ss."""
    if seconds is None:
        return "-:--"
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


class _RateColumn(ProgressColumn):
    """Images a second."""

    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        return Text("" if speed is None else f"{speed:,.0f} img/s")


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
