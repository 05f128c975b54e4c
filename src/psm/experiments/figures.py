"""The paper's figures from a study's answers, as matplotlib figures that read in print, on a phone and in gray.

Colors are those of Okabe and Ito; whatever a color tells, a marker or a dash tells too.
"""

import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from psm.experiments.aggregate import Answer, Cell, Group, Line
from psm.reporting.style import BLUE, GRAY, GREEN, ORANGE

BLACK = "#222222"
WIDTH = 4.6  # inches; at the width of a phone letters are still those of a book


class Drawing(NamedTuple):
    """One figure of a page."""

    name: str  # of its files
    caption: str
    figure: Figure

    def svg(self) -> str:
        stream = io.StringIO()
        with rc_context({"svg.hashsalt": self.name}):  # the same numbers give the same file
            self.figure.savefig(stream, format="svg", metadata={"Date": None})
        return stream.getvalue()[stream.getvalue().index("<svg") :]

    def png(self) -> bytes:
        stream = io.BytesIO()
        self.figure.savefig(stream, format="png", dpi=200)
        return stream.getvalue()


def drawings(answer: Answer) -> list[Drawing]:
    """The figures of an experiment, for each data set and protocol that anything was measured on."""
    draw: Callable[[Answer, Group], Iterator[tuple[str, str, Figure]]] = {
        "table": _table,
        "purity": _purity,
        "gradients": _gradients,
        "bars": _sweep,
        "sweep": _sweep,
    }[answer.experiment.draws]
    several = len({group.data for group in answer.groups}) < len(answer.groups)
    found = []
    for group in answer.groups:
        place = f"{answer.name}-{group.data}" + (f"-{group.protocol[:4]}" if several else "")
        found += [
            Drawing("-".join(filter(None, (place, suffix))), caption, figure)
            for suffix, caption, figure in (draw(answer, group) if group.runs else ())
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
    """Below the axes, where it hides nothing."""
    figure.legend(frameon=False, fontsize=9, ncols=columns, loc="outside lower center")


def _table(answer: Answer, group: Group) -> Iterator[tuple[str, str, Figure]]:
    """Ours and the paper's, a dot a row, in the same order; each with its own axis, since the scales are two."""
    score, lines = group.score, group.rows
    height = 0.9 + 0.32 * len(lines)
    figure, axis = _axes(height, f"Measured: {_score_name(score)} top-1 on {group.title}, %")
    for place, line in enumerate(lines):
        cell = line.cell(score)
        if cell.mean is None:
            continue
        color, marker = _style(line)
        axis.plot(list(cell.values.values()), [place] * cell.count, "|", color=color, markersize=9, alpha=0.7)
        axis.errorbar(cell.mean, place, xerr=cell.deviation or None, fmt=marker, color=color, capsize=3, markersize=6)
        _above(axis, cell.mean, place, cell.mean)
    _rows(axis, lines)
    first = lines[0].cell(score).mean
    if first is not None:
        axis.axvline(first, color=GRAY, linestyle=":", linewidth=1, zorder=0)
    yield (
        "",
        f"{group.title}, measured: dot and bar are mean and standard deviation over seeds, ticks the single runs"
        + (f", the dotted line is {lines[0].title}." if first is not None else "."),
        figure,
    )
    if any(line.paper for line in lines):
        figure, axis = _axes(height, f"Paper: linear top-1 on {group.title}, %")
        for place, line in enumerate(lines):
            if line.paper:
                color, marker = _style(line)
                axis.plot(line.paper[0], place, marker, color=color, markersize=6, mfc="white")
                _above(axis, line.paper[0], place, line.paper[0])
        _rows(axis, lines)
        yield "paper", f"{group.title}, printed in the paper (ResNet-18, 200 epochs; no spread is given).", figure


def _above(axis: Axes, x: float, y: float, value: float) -> None:
    axis.annotate(f"{value:.1f}", (x, y), (0, 5), textcoords="offset points", ha="center", fontsize=9)


def _rows(axis: Axes, lines: Sequence[Line]) -> None:
    axis.set_yticks(range(len(lines)), [line.title for line in lines])
    axis.set_ylim(len(lines) - 0.5, -0.7)
    axis.margins(x=0.12)
    axis.grid(axis="y", visible=False)


def _style(line: Line) -> tuple[str, str]:
    return (ORANGE, "D") if line.stressed else (BLUE, "o")


PURITY_STYLES = {0: (BLUE, "o"), 1: (ORANGE, "D"), 2: (GREEN, "s")}


def _purity(answer: Answer, group: Group) -> Iterator[tuple[str, str, Figure]]:
    """Figure 1: (a) the nearest row, (b) the five nearest, and how often one of the five at least is right."""
    chance = 100 / float(group.facts["classes"])
    panels = (
        ("top1", "Nearest row (top-1)", (("purity_top1", "-", ""),)),
        ("top5", "Five nearest (top-5)", (("purity_top5", "-", ", of the five"), ("hit_top5", "--", ", any of them"))),
    )
    for name, title, curves in panels:
        figure, axis = _axes(3.3, f"{title}: % with the query's label")
        for number, line in enumerate(group.rows):
            color, marker = PURITY_STYLES[number % len(PURITY_STYLES)]
            for measure, style, words in curves:
                if measure in line.curves:
                    _band(axis, line.curves[measure], color, style, marker, f"{line.title}{words}")
        axis.axhline(chance, color=GRAY, linestyle=":", linewidth=1.2, label="chance")
        axis.set_xlabel("epoch")
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.set_ylim(bottom=0)
        _legend(figure, columns=2)
        seeds = max(cell.count for line in group.rows for points in line.curves.values() for cell in points.values())
        spread = f"; bands are standard deviations over {seeds} seeds" if seeds > 1 else ""
        yield name, f"{group.title}: {_words(name)}{spread}.", figure


def _words(name: str) -> str:
    if name == "top1":
        return "how often the nearest row of the bank has the query's label"
    return "share of the five nearest rows with the query's label, and how often at least one of them has it"


def _band(axis: Axes, points: Mapping[int, Cell], color: str, style: str, marker: str, label: str) -> None:
    places = list(points)
    means = [cell.mean for cell in points.values()]
    spread = [cell.deviation or 0.0 for cell in points.values()]
    every = max(1, len(places) // 12)
    axis.plot(places, means, style, color=color, marker=marker, markersize=4, markevery=every, label=label)
    axis.fill_between(
        places,
        [mean - s for mean, s in zip(means, spread, strict=True)],
        [mean + s for mean, s in zip(means, spread, strict=True)],
        color=color,
        alpha=0.15,
        linewidth=0,
    )


def _gradients(answer: Answer, group: Group) -> Iterator[tuple[str, str, Figure]]:
    """Figure 2, by eq. 2 and by the loss that was trained with, and who the negatives are."""
    line = next((line for line in group.rows if line.ranks), None)
    if line is None:
        return
    places = list(range(1, len(line.ranks) + 1))
    positive = line.ranks[0]["positive_rank"].mean
    median = line.ranks[0]["positive_rank_median"].mean

    def curve(name: str) -> list[float]:
        return [rank[name].mean for rank in line.ranks]

    for name, kind, title, words in (
        ("eq2", "binary_slope", "dL/ds by eq. 2", "how the loss of a negative changes with its similarity, by eq. 2"),
        ("infonce", "softmax_slope", "dL/ds under InfoNCE (eq. 1)", "the same under the loss that was trained with"),
        ("length", "softmax_length", "Whole gradient under InfoNCE", "dL/ds times the length of the gradient of s"),
    ):
        figure, axis = _axes(3.3, f"{title}, over its maximum")
        for what, color, style in (("mean", BLUE, "-"), ("variance", ORANGE, "--")):
            values = curve(f"{kind}_{what}")
            largest = max(values) or 1.0
            axis.plot(places, [value / largest for value in values], style, color=color, label=what, linewidth=1.8)
        _positive(axis, positive, median, places[-1])
        axis.set_xlabel("rank of similarity among the bank's rows")
        axis.set_ylim(0, 1.05)
        _legend(figure, columns=2)
        caption = f"{line.title} on {group.title}: {words}; mean and variance over queries, divided by their maxima."
        yield name, caption, figure
    if "same_class" in line.ranks[0]:
        figure, axis = _axes(3.3, "Who the negatives are, %")
        axis.plot(places, [100 * x for x in curve("same_class")], "-", color=ORANGE, label="the query's label", lw=1.8)
        axis.plot(places, [100 * x for x in curve("own_image")], "--", color=BLUE, label="its own image", lw=1.8)
        axis.axhline(100 / float(group.facts["classes"]), color=GRAY, linestyle=":", linewidth=1.2, label="chance")
        axis.set_xlabel("rank of similarity among the bank's rows")
        axis.set_ylim(bottom=0)
        _legend(figure, columns=3)
        yield (
            "labels",
            f"{group.title}: share of negatives that are false ones, by label; labels serve this alone.",
            figure,
        )


def _positive(axis: Axes, mean: float, median: float, last: int) -> None:
    """The positive's rank; one that lies beyond the axis is said and not drawn."""
    if mean <= last:
        axis.axvline(mean, color=BLACK, linestyle="-.", linewidth=1.4, label=f"positive: mean {mean:.0f}")
    else:
        axis.plot([], [], "-.", color=BLACK, label=f"positive: mean {mean:.0f} (beyond)")
    if median <= last:
        axis.axvline(median, color=BLACK, linestyle=":", linewidth=1.2, label=f"positive: median {median:.0f}")


def _sweep(answer: Answer, group: Group) -> Iterator[tuple[str, str, Figure]]:
    """Figures 5 to 8: a point for each choice, and the spread of the paper's choice over seeds as the yardstick."""
    lines = group.rows
    figure, axis = _axes(3.4, f"top-1 on {group.title}, %")
    joined = answer.experiment.draws == "sweep"
    for score, color, marker, style in (("linear", BLUE, "o", "-"), ("knn", ORANGE, "D", "--")):
        shown = [(place, line.cell(score)) for place, line in enumerate(lines) if line.cell(score).count]
        if not shown:
            continue
        reference = next((line.cell(score) for line in lines if line.against is None), Cell())
        if reference.deviation is not None:
            low, high = reference.mean - reference.deviation, reference.mean + reference.deviation
            axis.axhspan(low, high, color=color, alpha=0.12, linewidth=0)
        axis.errorbar(
            [place for place, _ in shown],
            [cell.mean for _, cell in shown],
            yerr=[cell.deviation or 0.0 for _, cell in shown],
            fmt=f"{marker}{style if joined else ''}",
            color=color,
            capsize=3,
            markersize=6,
            label=_score_name(score),
        )
        for place, cell in shown:
            _above(axis, place, cell.mean + (cell.deviation or 0.0), cell.mean)
    axis.set_xticks(range(len(lines)), [_tick(line) for line in lines])
    axis.set_xlim(-0.4, len(lines) - 0.6)
    axis.margins(y=0.15)
    axis.set_xlabel(answer.experiment.axis)
    _legend(figure, columns=2)
    chosen = next((line for line in lines if line.against is None), None)
    spread = bool(chosen) and any(cell.count > 1 for cell in chosen.scores.values())
    bands = f"; bands are mean ± standard deviation of {chosen.title} over seeds" if spread else ""
    yield "", f"{group.title}: per cent right of the test images{bands}.", figure


def _tick(line: Line) -> str:
    name = line.title if line.value is None else f"{line.value:g}"
    return name if any(cell.count for cell in line.scores.values()) else f"{name}\n(missing)"


def _score_name(score: str) -> str:
    return {"linear": "linear", "knn": "nearest neighbors"}[score]
