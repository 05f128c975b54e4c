"""Curves of a run as SVG, in colours that colour-blind readers can tell apart."""

import io
from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure

BLUE, ORANGE, GREEN, GREY = "#0072B2", "#D55E00", "#009E73", "#888888"  # Okabe and Ito


def curves(metrics: Sequence[dict[str, Any]]) -> str:
    """Loss, nearest-neighbour score, spread of features and mining over the epochs, as an SVG element."""
    figure = Figure(figsize=(11, 5.8), layout="constrained")
    figure.get_layout_engine().set(h_pad=0.12)
    axes = figure.subplots(2, 2)
    epochs = [m["epoch"] for m in metrics]

    def line(axis, name: str, label: str, colour: str, **style) -> None:
        points = [(m["epoch"], m[name]) for m in metrics if name in m]
        if points:
            axis.plot(*zip(*points, strict=True), color=colour, label=label, marker="o", markersize=3, **style)

    line(axes[0, 0], "loss", "loss", BLUE)
    line(axes[0, 0], "chance", "guessing", GREY, linestyle="--")
    axes[0, 0].set_title("Loss")
    line(axes[0, 1], "knn", "top-1", ORANGE)
    axes[0, 1].set_title("Nearest neighbours, % right")
    line(axes[1, 0], "effective_rank", "effective rank", GREEN)
    axes[1, 0].set_title("Effective rank of the features")
    line(axes[1, 1], "mined_similarity", "similarity of mined positives", BLUE)
    line(axes[1, 1], "negatives_kept", "share of negatives kept", ORANGE)
    line(axes[1, 1], "bank_fill", "bank filled", GREY, linestyle="--")
    axes[1, 1].set_title("Mining")
    axes[1, 1].set_ylim(-0.02, 1.02)
    for axis in axes.flat:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25)
        axis.set_xlabel("epoch")
        axis.set_xlim(min(epochs) - 0.5, max(epochs) + 0.5)
        if len(axis.lines) > 1:
            axis.legend(frameon=False)
        elif not axis.lines:
            axis.text(0.5, 0.5, "not measured", transform=axis.transAxes, ha="center", color=GREY)
    stream = io.StringIO()
    figure.savefig(stream, format="svg", metadata={"Date": None})
    return stream.getvalue()[stream.getvalue().index("<svg") :]
