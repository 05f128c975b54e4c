"""Curves of a run's metrics as SVG."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from psm.reporting.style import BLUE, GRAY, GREEN, ORANGE
from psm.reporting.themed_svg import page_colors, svg_element


class Curve(NamedTuple):
    """One curve: the metric, its label, color and line style."""

    metric: str  # name in metrics.jsonl
    label: str
    color: str
    style: str = "-"


PANELS = {  # title -> curves
    "Loss": (Curve("loss", "loss", BLUE), Curve("chance", "guessing", GRAY, "--")),
    "Top-1 while training, %": (Curve("knn", "nearest neighbors", ORANGE), Curve("linear", "linear probe", BLUE, "--")),
    "Effective rank of the features": (Curve("effective_rank", "effective rank", GREEN),),
    "Mining": (
        Curve("mined_similarity", "similarity of mined positives", BLUE),
        Curve("negatives_kept", "share of negatives kept", ORANGE),
        Curve("bank_fill", "bank filled", GRAY, "--"),
    ),
}

FINETUNE_PANELS = {
    "Loss": (Curve("loss", "training", BLUE), Curve("validation_loss", "validation", ORANGE, "--")),
    "Accuracy, %": (Curve("train_accuracy", "training views", BLUE), Curve("validation", "validation", ORANGE, "--")),
    "Learning rate": (Curve("lr", "learning rate of the head", GREEN),),
}

Metrics = Sequence[dict[str, Any]]  # the records of metrics.jsonl


def draw_curves(metrics: Metrics, panels: Mapping[str, Sequence[Curve]] = PANELS) -> list[str]:
    """The panels' metrics over the epochs, an SVG element each; panels of which nothing was measured are left out."""
    with page_colors():
        return [
            _draw_panel(title, curves, metrics)
            for title, curves in panels.items()
            if any(curve.metric in record for curve in curves for record in metrics)
        ]


def _draw_panel(title: str, curves: Sequence[Curve], metrics: Metrics) -> str:
    figure = Figure(figsize=(5.4, 2.9), layout="constrained")
    axis = figure.subplots()
    for curve in curves:
        points = [(record["epoch"], record[curve.metric]) for record in metrics if curve.metric in record]
        if points:
            epochs, values = zip(*points, strict=True)
            axis.plot(epochs, values, curve.style, color=curve.color, label=curve.label, marker="o", markersize=3)
    axis.set_title(title, fontsize=11)
    axis.set_xlabel("epoch")
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(alpha=0.25)
    if len(axis.lines) > 1:
        axis.legend(frameon=False, fontsize=9)
    return svg_element(figure, f"{title} over the epochs")
