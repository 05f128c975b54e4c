"""Runs on the terminal: the list, and two side by side."""

import time
from collections.abc import Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from psm.config.evaluation import SCORES
from psm.reporting.runs.summary import ACCURACY, FINISHED, RUNNING, UNREADABLE, RunSummary
from psm.utils.errors import UserError

COLORS = {RUNNING: "cyan", FINISHED: "green", UNREADABLE: "red"}


def sorted_runs(runs: Sequence[RunSummary], sort: str, by: str) -> list[RunSummary]:
    """Runs by age, name or score; those without the score come last."""
    if sort == "name":
        return sorted(runs, key=lambda run: run.name)
    if sort == "score":
        scores = {run.name: run.score(by) for run in runs}
        return sorted(runs, key=lambda run: _descending(scores[run.name]))
    return sorted(runs, key=lambda run: -run.changed)


def _descending(score: float | None) -> float:
    return float("inf") if score is None else -score


def best_run(runs: Sequence[RunSummary], by: str) -> RunSummary:
    """The run with the highest score.

    Raises:
        UserError: No run has such a score.
    """
    scored = [run for run in sorted_runs(runs, "score", by) if run.score(by) is not None]
    if not scored:
        raise UserError(f"no run has a score by={by}: `psm evaluate RUN scores=[{by}]` makes one.")
    return scored[0]


def print_runs(runs: Sequence[RunSummary], by: str) -> None:
    """Print the table of runs with kNN, linear and the score ``by``; what none has is left out."""
    kinds = [kind for kind in (*SCORES, ACCURACY) if kind in ("knn", "linear", ACCURACY, by)]
    kinds = [kind for kind in kinds if any(run.score(kind) is not None for run in runs)]
    scores = [Column(kind, justify="right") for kind in kinds]
    name, epoch = Column("run", overflow="fold", min_width=8), Column("epoch", justify="right")
    look: Any = {"box": SIMPLE_HEAD, "padding": (0, 1, 0, 0), "pad_edge": False}  # fits 80 columns
    table = Table(name, "state", "method", "data", "encoder", epoch, *scores, "age", **look)
    for run in runs:
        color = COLORS.get(run.state, "yellow")
        shown = [_number(run.score(kind), measured=kind in run.scores) for kind in kinds]
        described = ("", "", "", "")
        if run.config:
            epochs = f"{run.epoch}/{run.config.epochs}"
            described = (run.method, escape(run.data), run.config.encoder or "", epochs)
        table.add_row(escape(run.name), f"[{color}]{run.state}[/]", *described, *shown, age(run.changed))
    Console().print(table)
    if any(run.score(kind) is not None and kind not in run.scores for run in runs for kind in kinds):
        print("~ measured while training; `psm evaluate RUN` scores by the full protocol.")
    for run in runs:
        if run.problem:
            print(f"{run.name}: {run.problem}")


def print_comparison(first: RunSummary, second: RunSummary) -> None:
    """Print scores of two runs and their difference, and the settings that they differ in."""
    for run in (first, second):
        if run.problem:
            raise UserError(run.problem)
    table = Table("", escape(first.name), escape(second.name), Column("difference", justify="right"))
    table.add_row("state", first.state, second.state, "")
    table.add_row("epoch", str(first.epoch), str(second.epoch), "")
    kinds = [kind for kind in (*SCORES, ACCURACY) if first.score(kind) is not None or second.score(kind) is not None]
    last = [run.metrics[-1] if run.metrics else {} for run in (first, second)]
    measured = {kind: (first.score(kind), second.score(kind)) for kind in kinds}
    measured |= {name: (last[0].get(name), last[1].get(name)) for name in ("loss", "effective_rank")}
    for name, (one, other) in measured.items():
        difference = f"{other - one:+.2f}" if one is not None and other is not None else ""
        table.add_row(name, _number(one), _number(other), difference)
    table.add_section()
    mine, theirs = first.settings(), second.settings()
    for key in [key for key in {**mine, **theirs} if mine.get(key) != theirs.get(key)]:
        table.add_row(key, escape(str(mine.get(key, ""))), escape(str(theirs.get(key, ""))), "")
    Console().print(table)


def age(changed: float) -> str:
    """How long ago, in the largest unit that fits: 5 min, 3 h, 12 d."""
    seconds = max(0.0, time.time() - changed)
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds // length:.0f} {unit}"
    return f"{seconds:.0f} s"


def _number(value: float | None, measured: bool = True) -> str:
    return "" if value is None else f"{'' if measured else '~'}{value:.2f}"
