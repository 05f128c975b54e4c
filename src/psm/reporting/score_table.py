"""Scores with their 95 % intervals as rows: for the terminal and for the page of a run."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from psm.data.location import data_name
from psm.evaluation.scores import Estimate, Score

EXPLAINED = "in brackets: 95 % interval"


class ScoreRow(NamedTuple):
    """One score as it is shown: whose, what, by which protocol, and the values."""

    of: str
    title: str
    protocol: str
    values: tuple[str, ...]  # top-1 and top-5, or one value


def score_rows(scores: Iterable[Score]) -> tuple[list[ScoreRow], list[ScoreRow]]:
    """Rows of the accuracies, and of the other measures."""
    accuracies: list[ScoreRow] = []
    measures: list[ScoreRow] = []
    for score in scores:
        values = tuple(format_estimate(estimate) for estimate in score.estimates.values())
        row = ScoreRow(score.of, score.title, score.describe(), values)
        (accuracies if score.is_accuracy else measures).append(row)
    return accuracies, measures


def format_estimate(estimate: Estimate) -> str:
    """``39.20 [38.3, 40.2]``; numbers up to 1, such as NMI, with three decimals."""
    ends = () if estimate.interval is None else estimate.interval
    small = max(map(abs, (estimate.value, *ends))) <= 1
    interval = f" [{', '.join(f'{end:.{3 if small else 1}f}' for end in ends)}]" if ends else ""
    return f"{estimate.value:.{3 if small else 2}f}{interval}"


def scores_table(scores: Iterable[Score]) -> None:
    """Print a row per score."""
    scores = list(scores)
    accuracies, measures = score_rows(scores)
    console = Console()
    if accuracies:
        console.print(_table(("", "accuracy, %", "protocol", "top-1", "top-5"), accuracies))
    if measures:
        console.print(_table(("", "measure", "protocol", "value"), measures))
    protocol = scores[-1].protocol
    kind = "held-out training" if scores[-1].held_out else "test"
    tested = f" and {protocol['test_images']:,} {kind} images, {protocol['classes']} classes"
    console.print(
        f"{data_name(protocol['data'])}: {protocol['train_images']:,} training"
        f"{tested if protocol['test_images'] else ' images'}; "
        f"encoder {protocol['encoder']}, epoch {protocol['epoch']}; {EXPLAINED}",
        style="dim",
        highlight=False,
        markup=False,
    )


def _table(heads: Sequence[str], rows: Sequence[ScoreRow]) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for place, head in enumerate(heads):
        number = place >= 3
        table.add_column(head, justify="right" if number else "left", no_wrap=number)
    shown = ""
    for row in rows:
        if shown and row.of != shown:
            table.add_section()
        table.add_row(row.of if row.of != shown else "", row.title, row.protocol, *_padded(row.values, len(heads) - 3))
        shown = row.of
    return table


def _padded(values: Sequence[str], count: int) -> list[str]:
    return [*values, *[""] * (count - len(values))]
