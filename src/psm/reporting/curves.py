"""Curves of a run as SVG, in colors that color-blind readers can tell apart."""

import io
from collections.abc import Sequence
from typing import Any, NamedTuple

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from psm.reporting.style import BLUE, GRAY, GREEN, ORANGE


class Line(NamedTuple):
    """One curve: a name of metrics.jsonl, what it is called, how it is drawn."""

    name: str
    label: str
    color: str
    style: str = "-"


CURVES = {
    "Loss": (Line("loss", "loss", BLUE), Line("chance", "guessing", GRAY, "--")),
    "Nearest neighbors, % right": (Line("knn", "top-1", ORANGE),),
    "Effective rank of the features": (Line("effective_rank", "effective rank", GREEN),),
    "Mining": (
        Line("mined_similarity", "similarity of mined positives", BLUE),
        Line("negatives_kept", "share of negatives kept", ORANGE),
        Line("bank_fill", "bank filled", GRAY, "--"),
    ),
}


def curves(metrics: Sequence[dict[str, Any]]) -> list[str]:
    """Loss, nearest-neighbor score, rank of the features and mining over the epochs, an SVG element each."""
    return [_curve(title, lines, metrics) for title, lines in CURVES.items() if _measured(lines, metrics)]


def _measured(lines: Sequence[Line], metrics: Sequence[dict[str, Any]]) -> bool:
    return any(line.name in record for line in lines for record in metrics)


def _curve(title: str, lines: Sequence[Line], metrics: Sequence[dict[str, Any]]) -> str:
    figure = Figure(figsize=(5.4, 2.9), layout="constrained")
    axis = figure.subplots()
    for line in lines:
        points = [(record["epoch"], record[line.name]) for record in metrics if line.name in record]
        if points:
            axis.plot(
                *zip(*points, strict=True), line.style, color=line.color, label=line.label, marker="o", markersize=3
            )
    axis.set_title(title, fontsize=11)
    axis.set_xlabel("epoch")
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(alpha=0.25)
    if len(axis.lines) > 1:
        axis.legend(frameon=False, fontsize=9)
    stream = io.StringIO()
    figure.savefig(stream, format="svg", metadata={"Date": None})
    return stream.getvalue()[stream.getvalue().index("<svg") :]
