"""Draw the figures that the benchmarks left in benchmarks/results: docs/speed.svg and docs/growth.svg.

python benchmarks/chart.py
"""

import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.axes import Axes

RESULTS, DOCS = Path(__file__).resolve().parent / "results", Path(__file__).resolve().parent.parent / "docs"
INK, PSM, OTHER, THIRD = "#333333", "#0072B2", "#E69F00", "#009E73"
NAMES = {"simclr": "SimCLR", "byol": "BYOL", "mocov2": "MoCo v2", "nnclr": "NNCLR", "psm": "PSM"}


def read(name: str) -> list[dict]:
    return json.loads((RESULTS / f"{name}.json").read_text())


def bare(axes: Axes, title: str) -> None:
    axes.set_title(title, loc="left", fontsize=10, color=INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=9, colors=INK)


def throughput() -> None:
    """Images a second of psm, of the bare networks and of lightly, a panel for each encoder."""
    rows = read("pipeline")
    encoders = list(dict.fromkeys(row["encoder"] for row in rows))
    figure, panels = pyplot.subplots(1, len(encoders), figsize=(9, 3.2), layout="constrained")
    bars = (("psm", "psm", PSM, ""), ("bare", "networks alone", "#BBBBBB", "//"), ("lightly", "lightly", OTHER, ".."))
    for axes, encoder in zip(panels, encoders, strict=True):
        of_encoder = [row for row in rows if row["encoder"] == encoder]
        for place, (name, label, colour, hatch) in enumerate(bars):
            at = [index + (place - 1) * 0.27 for index in range(len(of_encoder))]
            rates = [row["images a second"][name] for row in of_encoder]
            axes.bar(at, rates, 0.25, label=label, color=colour, hatch=hatch, edgecolor="white", linewidth=0)
        for index, row in enumerate(of_encoder):
            height = max(row["images a second"].values())
            factor = row["times lightly"]["median"]
            axes.annotate(
                f"{factor:.1f} x lightly", (index, height), (0, 3), textcoords="offset points", ha="center", fontsize=8
            )
        axes.set_xticks(range(len(of_encoder)), [NAMES[row["method"]] for row in of_encoder])
        bare(axes, f"{encoder}: images a second, batch 256, 32 px")
    panels[0].legend(frameon=False, fontsize=8, loc="lower right")
    figure.savefig(DOCS / "speed.svg")


def growth() -> None:
    """Milliseconds of search and loss along bank, batch and k."""
    rows = read("growth")
    figure, panels = pyplot.subplots(1, 3, figsize=(9, 3.2), layout="constrained", sharey=True)
    lines = (
        ("loss", "PSM's loss and gradient", PSM, "o"),
        ("search", "exact search, one direction", OTHER, "s"),
        ("byol", "BYOL's loss and gradient", THIRD, "^"),
    )
    for axes, axis in zip(panels, ("bank", "batch", "k"), strict=True):
        along = [row for row in rows if row["axis"] == axis]
        for name, label, colour, marker in lines:
            middle = [row[name]["median"] for row in along]
            axes.plot([row[axis] for row in along], middle, color=colour, marker=marker, markersize=4, label=label)
            low, high = ([row[name][end] for row in along] for end in ("least", "most"))
            axes.fill_between([row[axis] for row in along], low, high, color=colour, alpha=0.15, linewidth=0)
        axes.set_xscale("log")
        axes.set_yscale("log")
        bare(axes, {"bank": "rows in the bank", "batch": "pictures in a batch", "k": "mined positives k"}[axis])
    panels[0].set_ylabel("milliseconds", fontsize=9)
    panels[2].legend(frameon=False, fontsize=8, loc="upper left")
    figure.savefig(DOCS / "growth.svg")


if __name__ == "__main__":
    throughput()
    growth()
