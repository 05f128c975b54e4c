"""The paper's figures from a study's results, as matplotlib figures readable in print, on a phone and in gray.

Colors are those of Okabe and Ito; every distinction by color is also one by marker or dash.
"""

import io
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from textwrap import fill
from typing import NamedTuple

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator, NullLocator

from psm.experiments.aggregate import ExperimentResult, ResultRow, ResultTable, SeedStats
from psm.reporting.style import BLACK, BLUE, GRAY, GREEN, ORANGE, PURPLE

WIDTH = 4.6  # inches: at the width of a phone the text has the size of a book's
GRID_RANGE = 8.0  # points below the best at which a cell of a grid is white
SCORE_NAMES = {"linear": "linear", "knn": "nearest neighbors"}

Figures = Iterator[tuple[str, str, Figure]]  # suffix of the file name, caption, figure


class Drawing(NamedTuple):
    """One figure of a page."""

    name: str  # of its files
    caption: str
    figure: Figure

    def svg(self) -> str:
        stream = io.StringIO()
        with rc_context({"svg.hashsalt": self.name}):  # equal numbers give equal files
            self.figure.savefig(stream, format="svg", metadata={"Date": None})
        return stream.getvalue()[stream.getvalue().index("<svg") :]

    def png(self) -> bytes:
        stream = io.BytesIO()
        self.figure.savefig(stream, format="png", dpi=200)
        return stream.getvalue()


def drawings(result: ExperimentResult) -> list[Drawing]:
    """The figures of an experiment, for each table with results."""
    draw = _DRAW[result.experiment.kind]
    several = len({table.data for table in result.tables}) < len(result.tables)
    found = []
    for table in result.tables:
        name = f"{result.name}-{table.data}" + (f"-{table.protocol[:4]}" if several else "")
        found += [
            Drawing("-".join(filter(None, (name, suffix))), caption, figure)
            for suffix, caption, figure in (draw(result, table) if table.runs else ())
        ]
    return found


def _axes(height: float, title: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    axis = figure.subplots()
    axis.set_title(title, fontsize=10.5, loc="left")
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(alpha=0.25)
    return figure, axis


def _legend(figure: Figure, columns: int) -> None:
    """A legend below the axes, where it covers nothing."""
    figure.legend(frameon=False, fontsize=9, ncols=columns, loc="outside lower center")


def _draw_table(result: ExperimentResult, table: ResultTable) -> Figures:
    """Measured and paper's top-1, a dot per row in the same order, on axes of their own since the scales differ."""
    rows = table.method_rows
    reference = rows[0].title if rows[0].score(table.main_score).count else None
    yield (
        "",
        f"{table.title}, measured: dot and bar are mean and 95 % interval over seeds, ticks the single runs"
        + (f", the dotted line is {reference}." if reference else "."),
        _measured_dots(rows, table),
    )
    if any(row.paper for row in rows):
        caption = f"{table.title}, printed in the paper (ResNet-18, 200 epochs; no spread is given)."
        yield "paper", caption, _paper_dots(rows, table)


def _measured_dots(rows: Sequence[ResultRow], table: ResultTable) -> Figure:
    score = table.main_score
    title = f"{SCORE_NAMES[score]} top-1 on {table.title}, %"
    figure, axis = _axes(_rows_height(rows), f"Measured: {title}" if table.has_paper else title)
    for place, row in enumerate(rows):
        stats = row.score(score)
        if not stats.count:
            continue
        color, marker = _row_style(row)
        axis.plot(list(stats.values.values()), [place] * stats.count, "|", color=color, markersize=9, alpha=0.7)
        axis.errorbar(stats.mean, place, xerr=stats.half_width, fmt=marker, color=color, capsize=3, markersize=6)
        _label_point(axis, stats.mean, place, stats.mean)
    _row_labels(axis, rows)
    if rows[0].score(score).count:
        axis.axvline(rows[0].score(score).mean, color=GRAY, linestyle=":", linewidth=1, zorder=0)
    return figure


def _paper_dots(rows: Sequence[ResultRow], table: ResultTable) -> Figure:
    figure, axis = _axes(_rows_height(rows), f"Paper: linear top-1 on {table.title}, %")
    for place, row in enumerate(rows):
        if row.paper:
            color, marker = _row_style(row)
            axis.plot(row.paper[0], place, marker, color=color, markersize=6, mfc="white")
            _label_point(axis, row.paper[0], place, row.paper[0])
    _row_labels(axis, rows)
    return figure


def _rows_height(rows: Sequence[ResultRow]) -> float:
    return 0.9 + 0.32 * len(rows)


def _label_point(axis: Axes, x: float, y: float, value: float) -> None:
    """Write a value above a point."""
    axis.annotate(f"{value:.1f}", (x, y), (0, 5), textcoords="offset points", ha="center", fontsize=9)


def _row_labels(axis: Axes, rows: Sequence[ResultRow]) -> None:
    axis.set_yticks(range(len(rows)), [fill(row.title, 28) for row in rows])
    axis.set_ylim(len(rows) - 0.5, -0.7)
    axis.margins(x=0.12)
    axis.grid(axis="y", visible=False)


def _row_style(row: ResultRow) -> tuple[str, str]:
    """Color and marker of a row."""
    return (ORANGE, "D") if row.highlight else (BLUE, "o")


PURITY_STYLES = ((BLUE, "o"), (ORANGE, "D"), (GREEN, "s"))
PURITY_PANELS = (  # suffix, title, caption, (metric, line style, label)
    (
        "top1",
        "Nearest row (top-1)",
        "how often the nearest row of the bank has the query's label",
        (("purity_top1", "-", ""),),
    ),
    (
        "top5",
        "Five nearest (top-5)",
        "share of the five nearest rows with the query's label, and how often at least one of them has it",
        (("purity_top5", "-", ", of the five"), ("hit_top5", "--", ", any of them")),
    ),
)


def _draw_purity(result: ExperimentResult, table: ResultTable) -> Figures:
    """Figure 1: purity of the nearest row, of the five nearest, and whether any of the five has the query's label."""
    counts = [s.count for row in table.method_rows for points in row.curves.values() for s in points.values()]
    seeds = max(counts, default=0)
    bands = f"; bands are 95 % intervals over {seeds} seeds" if seeds > 1 else ""
    for suffix, title, caption, curves in PURITY_PANELS:
        figure, axis = _axes(3.3, f"{title}: % with the query's label")
        for number, row in enumerate(table.method_rows):
            color, marker = PURITY_STYLES[number % len(PURITY_STYLES)]
            for metric, style, label in curves:
                if metric in row.curves:
                    _plot_band(axis, row.curves[metric], color, style, marker, f"{row.title}{label}")
        _chance_line(axis, table)
        axis.set_xlabel("epoch")
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.set_ylim(bottom=0)
        _legend(figure, columns=2)
        yield suffix, f"{table.title}: {caption}{bands}.", figure


def _chance_line(axis: Axes, table: ResultTable) -> None:
    chance = 100 / float(table.settings["classes"])
    axis.axhline(chance, color=GRAY, linestyle=":", linewidth=1.2, label="chance")


def _plot_band(axis: Axes, points: Mapping[int, SeedStats], color: str, style: str, marker: str, label: str) -> None:
    """Plot the mean over epochs with a band of its 95 % interval."""
    epochs = list(points)
    means = [stats.mean for stats in points.values()]
    halves = [stats.half_width or 0.0 for stats in points.values()]
    every = max(1, len(epochs) // 12)
    axis.plot(epochs, means, style, color=color, marker=marker, markersize=4, markevery=every, label=label)
    axis.fill_between(
        epochs,
        [mean - half for mean, half in zip(means, halves, strict=True)],
        [mean + half for mean, half in zip(means, halves, strict=True)],
        color=color,
        alpha=0.15,
        linewidth=0,
    )


GRADIENT_PANELS = (  # suffix, columns, title, caption
    ("eq2", "binary_slope", "dL/ds by eq. 2", "how the loss of a negative changes with its similarity, by eq. 2"),
    ("infonce", "softmax_slope", "dL/ds under InfoNCE (eq. 1)", "the same under the loss that was trained with"),
    ("length", "softmax_length", "Whole gradient under InfoNCE", "dL/ds times the norm of the gradient of s"),
)


def _draw_gradients(result: ExperimentResult, table: ResultTable) -> Figures:
    """Figure 2, by eq. 2 and by the trained loss, and the share of false negatives."""
    row = next((row for row in table.method_rows if row.ranks), None)
    if row is None:
        return
    for suffix, column, title, text in GRADIENT_PANELS:
        caption = f"{row.title} on {table.title}: {text}; mean and variance over queries, divided by their maxima."
        yield suffix, caption, _gradient_figure(row, column, title)
    if "same_class" in row.ranks[0]:
        caption = f"{table.title}: share of negatives that are false ones, by label; labels serve this figure only."
        yield "labels", caption, _false_negatives_figure(row, table)


def _gradient_figure(row: ResultRow, column: str, title: str) -> Figure:
    """Mean and variance of a gradient over the ranks, each divided by its maximum."""
    ranks = range(1, len(row.ranks) + 1)
    figure, axis = _axes(3.3, f"{title}, over its maximum")
    for statistic, color, style in (("mean", BLUE, "-"), ("variance", ORANGE, "--")):
        values = _rank_means(row, f"{column}_{statistic}")
        largest = max(values) or 1.0
        axis.plot(ranks, [value / largest for value in values], style, color=color, label=statistic, linewidth=1.8)
    _mark_positive_rank(axis, row)
    axis.set_xlabel("rank of similarity among the bank's rows")
    axis.set_ylim(0, 1.05)
    _legend(figure, columns=2)
    return figure


def _false_negatives_figure(row: ResultRow, table: ResultTable) -> Figure:
    """Share of negatives of the query's label, and of its own image, over the ranks."""
    ranks = range(1, len(row.ranks) + 1)
    figure, axis = _axes(3.3, "False negatives, %")
    for column, color, style, label in (
        ("same_class", ORANGE, "-", "the query's label"),
        ("own_image", BLUE, "--", "its own image"),
    ):
        axis.plot(ranks, [100 * x for x in _rank_means(row, column)], style, color=color, label=label, lw=1.8)
    _chance_line(axis, table)
    axis.set_xlabel("rank of similarity among the bank's rows")
    axis.set_ylim(bottom=0)
    _legend(figure, columns=3)
    return figure


def _rank_means(row: ResultRow, column: str) -> list[float]:
    return [rank[column].mean for rank in row.ranks]


def _mark_positive_rank(axis: Axes, row: ResultRow) -> None:
    """Mark mean and median rank of the positive; a mean beyond the axis stands in the legend only."""
    mean, median = (row.ranks[0][name].mean for name in ("positive_rank", "positive_rank_median"))
    if mean <= len(row.ranks):
        axis.axvline(mean, color=BLACK, linestyle="-.", linewidth=1.4, label=f"positive: mean {mean:.0f}")
    else:
        axis.plot([], [], "-.", color=BLACK, label=f"positive: mean {mean:.0f} (beyond)")
    if median <= len(row.ranks):
        axis.axvline(median, color=BLACK, linestyle=":", linewidth=1.2, label=f"positive: median {median:.0f}")


def _draw_sweep(result: ExperimentResult, table: ResultTable) -> Figures:
    """Figures 5 to 8: a point per choice, and the spread of the reference over seeds as a band."""
    rows = table.method_rows
    reference = next((row for row in rows if row.reference is None), None)
    figure, axis = _axes(3.4, f"top-1 on {table.title}, %")
    line = "-" if result.experiment.kind == "sweep" else ""
    for score, color, marker, dash in (("linear", BLUE, "o", ""), ("knn", ORANGE, "D", "-")):
        _plot_choices(axis, rows, reference, score, color, f"{marker}{line and line + dash}")
    axis.set_xticks(range(len(rows)), [_tick_label(row) for row in rows])
    axis.set_xlim(-0.4, len(rows) - 0.6)
    axis.margins(y=0.15)
    axis.set_xlabel(result.experiment.axis)
    _legend(figure, columns=2)
    has_band = reference is not None and any(stats.count > 1 for stats in reference.scores.values())
    bands = f"; bands are the 95 % interval of {reference.title} over seeds" if reference and has_band else ""
    yield "", f"{table.title}: accuracy on {table.scored_on} in percent{bands}.", figure


def _draw_grid(result: ExperimentResult, table: ResultTable) -> Figures:
    """A row per series, a column per position; what a group gets is framed, the shade is the distance to its best."""
    series = list(dict.fromkeys(row.series for row in table.method_rows))
    positions = sorted({row.value for row in table.method_rows if row.value is not None})
    best, chosen, score = table.best_rows(), table.chosen_rows(), table.main_score
    figure, axis = _axes(1.1 + 0.3 * len(series), f"{SCORE_NAMES[score]} top-1 on {table.title}, %")
    for row in table.method_rows:
        if row.value is None or not row.score(score).count:
            continue
        mean, top = row.score(score).mean, best[row.group].score(score).mean
        place = positions.index(row.value), series.index(row.series)
        shade = max(0.0, 1 - (top - mean) / GRID_RANGE)
        corner = (place[0] - 0.5, place[1] - 0.5)
        axis.add_patch(Rectangle(corner, 1, 1, facecolor=BLUE, alpha=0.35 * shade, linewidth=0))
        if row is chosen[row.group]:
            axis.add_patch(Rectangle(corner, 1, 1, fill=False, edgecolor=ORANGE, linewidth=2, zorder=3))
        axis.text(*place, f"{mean:.1f}", ha="center", va="center", fontsize=9)
    axis.set_xticks(range(len(positions)), [f"{position:g}" for position in positions])
    axis.set_yticks(range(len(series)), [fill(name, 28) for name in series], fontsize=8)
    axis.set_xlim(-0.5, len(positions) - 0.5)
    axis.set_ylim(len(series) - 0.5, -0.5)
    axis.set_xlabel(result.experiment.axis)
    axis.grid(visible=False)
    yield "", f"{table.title}: accuracy on {table.scored_on} in percent; framed: what each method gets.", figure


SCHEDULE_STYLES = (  # color, marker, dash
    (BLUE, "o", "-"),
    (GREEN, "s", "--"),
    (GRAY, "^", "-."),
    (BLACK, "v", ":"),
    (ORANGE, "D", "-"),
    (PURPLE, "P", "-"),
)


def _draw_schedules(result: ExperimentResult, table: ResultTable) -> Figures:
    """A line per method over the steps of its schedules; bars are 95 % intervals."""
    series = list(dict.fromkeys(row.series for row in table.method_rows))
    for score in (table.main_score, table.other_score):
        figure, axis = _axes(3.8, f"{SCORE_NAMES[score].capitalize()} top-1 on {table.title}, %")
        for name, (color, marker, dash) in zip(series, itertools.cycle(SCHEDULE_STYLES)):
            rows = [row for row in table.method_rows if row.series == name and row.score(score).count]
            axis.errorbar(
                [row.steps for row in rows],
                [row.score(score).mean for row in rows],
                yerr=[row.score(score).half_width or 0.0 for row in rows],
                color=color,
                marker=marker,
                linestyle=dash,
                capsize=3,
                markersize=6,
                label=name,
            )
        axis.set_xscale("log")
        steps = sorted({row.steps for row in table.method_rows if row.steps})
        axis.set_xticks(steps, [f"{count:,}" for count in steps])
        axis.xaxis.set_minor_locator(NullLocator())
        axis.set_xlabel(result.experiment.axis)
        axis.margins(x=0.15)
        _legend(figure, columns=3)
        seeds = max((row.score(score).count for row in table.method_rows), default=0)
        bars = "; bars are 95 % intervals over seeds" if seeds > 1 else ""
        yield (
            score,
            f"{table.title}: accuracy on {table.scored_on} in percent, each point a schedule of its own{bars}.",
            figure,
        )


def _plot_choices(
    axis: Axes, rows: Sequence[ResultRow], reference: ResultRow | None, score: str, color: str, fmt: str
) -> None:
    """Plot one score of all rows, and the band of the reference."""
    shown = [(place, row.score(score)) for place, row in enumerate(rows) if row.score(score).count]
    if not shown:
        return
    band = reference.score(score) if reference else SeedStats()
    if band.interval is not None:
        axis.axhspan(band.interval.low, band.interval.high, color=color, alpha=0.12, linewidth=0)
    axis.errorbar(
        [place for place, _ in shown],
        [stats.mean for _, stats in shown],
        yerr=[stats.half_width or 0.0 for _, stats in shown],
        fmt=fmt,
        color=color,
        capsize=3,
        markersize=6,
        label=SCORE_NAMES[score],
    )
    for place, stats in shown:
        _label_point(axis, place, stats.mean + (stats.half_width or 0.0), stats.mean)


def _tick_label(row: ResultRow) -> str:
    name = row.title if row.value is None else f"{row.value:g}"
    return name if any(stats.count for stats in row.scores.values()) else f"{name}\n(missing)"


_DRAW: dict[str, Callable[[ExperimentResult, ResultTable], Figures]] = {
    "table": _draw_table,
    "purity": _draw_purity,
    "gradients": _draw_gradients,
    "bars": _draw_sweep,
    "sweep": _draw_sweep,
    "grid": _draw_grid,
    "schedules": _draw_schedules,
}
