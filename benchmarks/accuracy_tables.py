"""Table and chart of what benchmarks/time_to_accuracy.py left."""

from pathlib import Path

from matplotlib import pyplot

from table_text import figure_of, read, table
from turns import spread

TARGETS = (50.0, 60.0)
BESIDE = "lightly/simclr"  # what a method of psm is compared with that lightly was not run with
COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#333333", "#999999")
Curve = list[tuple[int, float, float]]  # steps, seconds, score


def seconds_to(curve: Curve, target: float) -> float | None:
    """Seconds until the first score that reaches the target; None if none does."""
    return next((seconds for _, seconds, score in curve if score >= target), None)


def curves() -> dict[int, dict[str, dict[int, Curve]]]:
    """Epochs of the schedule -> contender -> seed -> curve."""
    found: dict[int, dict[str, dict[int, Curve]]] = {}
    for row in read("time_to_accuracy"):
        found.setdefault(row["epochs"], {}).setdefault(row["contender"], {})[row["seed"]] = row["curve"]
    return found


def _words(values: list[float | None], digits: int) -> str:
    """Of all seeds; "never" if one of them has none."""
    if not values:
        return "–"
    if None in values:
        return f"never in {values.count(None)} of {len(values)}"
    return figure_of(spread(values), digits) if len(values) > 1 else f"{values[0]:.{digits}f}"


def _rows(epochs: int, found: dict[str, dict[int, Curve]], target: float) -> list[list[object]]:
    """A row for each contender of a schedule, beside lightly with the same method where it was run, else SimCLR."""
    rows = []
    for contender, by_seed in found.items():
        beside = f"lightly/{contender.partition('/')[2]}"
        lightly = found.get(beside, found.get(BESIDE, {}))
        times = {seed: seconds_to(curve, target) for seed, curve in by_seed.items()}
        others = {seed: seconds_to(curve, target) for seed, curve in lightly.items()}
        ratios = [other / time for seed, time in times.items() if time and (other := others.get(seed))]
        most = max(curve[-1][0] for curve in by_seed.values())
        seconds = _words(list(times.values()), 0)
        rows.append([contender, f"{target:.0f} %", epochs, seconds, _words(ratios, 1), f"{most:,}", len(by_seed)])
    return rows


def accuracy_table() -> str:
    rows = []
    for epochs, found in sorted(curves().items()):
        for target in TARGETS:
            if any(seconds_to(curve, target) for by_seed in found.values() for curve in by_seed.values()):
                rows += _rows(epochs, found, target)
    return table(("", "kNN", "epochs", "seconds", "times as fast as lightly", "steps at most", "seeds"), rows)


def accuracy_chart(path: Path, target: float = TARGETS[0]) -> None:
    """Accuracy over seconds of training under the shortest schedule, a line for each seed."""
    figure, axes = pyplot.subplots(figsize=(7, 3.6), layout="constrained")
    for color, (contender, by_seed) in zip(COLORS, curves()[min(curves())].items(), strict=False):
        for index, curve in enumerate(by_seed.values()):
            label = contender if not index else None
            x, y = ([point[place] for point in curve] for place in (1, 2))
            axes.plot(x, y, color=color, marker="o", markersize=3, label=label)
    axes.axhline(target, color="#999999", linewidth=0.8, linestyle="--")
    axes.set_xlabel("seconds of training", fontsize=9)
    axes.set_ylabel("kNN top-1, %", fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9, loc="lower right")
    figure.savefig(path)
    pyplot.close(figure)
