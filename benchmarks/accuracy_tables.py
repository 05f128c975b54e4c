"""Table and chart of what benchmarks/time_to_accuracy.py left."""

from pathlib import Path

from matplotlib import pyplot

from table_text import figure_of, read, table
from turns import spread

TARGETS = (50.0, 60.0)
BESIDE = "lightly/simclr"
COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#333333", "#999999")
Curve = list[tuple[int, float, float]]  # steps, seconds, score


def seconds_to(curve: Curve, target: float) -> float | None:
    """Seconds until the first score that reaches the target; None if none does."""
    return next((seconds for _, seconds, score in curve if score >= target), None)


def curves() -> dict[str, dict[int, Curve]]:
    """Contender -> seed -> curve."""
    found: dict[str, dict[int, Curve]] = {}
    for row in read("time_to_accuracy"):
        found.setdefault(row["contender"], {})[row["seed"]] = row["curve"]
    return found


def _words(values: list[float | None], digits: int) -> str:
    """Of all seeds; "never" if one of them has none."""
    if not values:
        return "–"
    if None in values:
        return f"never in {values.count(None)} of {len(values)}"
    return figure_of(spread(values), digits) if len(values) > 1 else f"{values[0]:.{digits}f}"


def accuracy_table() -> str:
    found = curves()
    reached = [target for target in TARGETS if any(seconds_to(c, target) for by in found.values() for c in by.values())]
    rows = []
    for contender, by_seed in found.items():
        cells: list[object] = [contender]
        for target in reached:
            times = {seed: seconds_to(curve, target) for seed, curve in by_seed.items()}
            other = {seed: seconds_to(curve, target) for seed, curve in found[BESIDE].items()}
            ratios = [other[seed] / time for seed, time in times.items() if time and other.get(seed)]
            cells += [_words(list(times.values()), 0), _words(ratios, 1)]
        cells += [f"{max(curve[-1][0] for curve in by_seed.values()):,}", len(by_seed)]
        rows.append(cells)
    head = [part for target in reached for part in (f"seconds to {target:.0f} %", f"times as fast as {BESIDE}")]
    return table(("", *head, "steps at most", "seeds"), rows)


def accuracy_chart(path: Path, target: float = TARGETS[0]) -> None:
    """Accuracy over seconds of training, a line for each seed."""
    figure, axes = pyplot.subplots(figsize=(7, 3.6), layout="constrained")
    for color, (contender, by_seed) in zip(COLORS, curves().items(), strict=False):
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
