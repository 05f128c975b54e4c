"""The page of `psm worth`: the answer, the curve, the labels saved, all results, and how they were measured."""

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from psm.config import merge as settings
from psm.finetuning.worth.analysis import Gain, Worth
from psm.finetuning.worth.cells import TITLES
from psm.finetuning.worth.folder import WorthFolder
from psm.finetuning.worth.run import WorthResult
from psm.reporting.style import BLUE, GRAY, GREEN, ORANGE
from psm.reporting.templates import template_environment
from psm.reporting.themed_svg import page_colors, svg_element
from psm.reporting.worth_terminal import saved_text
from psm.utils.files import write_text_atomically

STYLES = {  # arm -> color, marker, line: told apart without color too
    "scratch": (GRAY, "s", "--"),
    "knn": (GREEN, "^", ":"),
    "logistic": (BLUE, "D", "-."),
    "finetune": (ORANGE, "o", "-"),
}


def write_page(result: WorthResult) -> Path:
    """Write worth.html of a comparison, replacing an earlier one."""
    worth, page = result.worth, WorthFolder(result.folder).page
    arms = [arm for arm in TITLES if any(point.arm == arm for point in worth.points)]
    html = (
        template_environment()
        .get_template("worth.html")
        .render(
            worth=worth,
            about=result.about,
            config=result.config,
            draws=max((point.draws for point in worth.points), default=0),
            chart=draw_worth(worth),
            titles=TITLES,
            arms=arms,
            gains=[(gain, _needed_text(gain), saved_text(gain)) for gain in worth.gains],
            rows=_rows(worth, arms),
            settings=settings.to_yaml(result.config),
        )
    )
    write_text_atomically(page, html)
    return page


def draw_worth(worth: Worth) -> str:
    """Accuracy by the number of labels, a curve for each arm, as an SVG element."""
    with page_colors("worth"):
        figure = Figure(figsize=(6.4, 4.0), layout="constrained")
        axis = figure.subplots()
        for arm, title in TITLES.items():
            points = sorted((p for p in worth.points if p.arm == arm), key=lambda point: point.labels)
            if not points:
                continue
            color, marker, line = STYLES[arm]
            labels, means = [p.labels for p in points], [p.top1 for p in points]
            lows, highs = [p.interval.low for p in points], [p.interval.high for p in points]
            axis.fill_between(labels, lows, highs, color=color, alpha=0.12, linewidth=0)
            spread = [[m - low for m, low in zip(means, lows, strict=True)]]
            spread.append([high - m for m, high in zip(means, highs, strict=True)])
            axis.errorbar(
                labels, means, yerr=spread, fmt=marker + line, color=color, markersize=6, capsize=3, label=title
            )
            for point in points:
                axis.plot([point.labels] * len(point.each), point.each, "_", color=color, alpha=0.6, markersize=8)
        amounts = sorted({point.labels for point in worth.points})
        axis.set_xscale("log")
        axis.set_xticks(amounts, [f"{labels:,}" for labels in amounts])
        axis.xaxis.set_minor_locator(NullLocator())
        axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set(xlabel="labels", ylabel="top-1 on the test images, %")
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.2)
        figure.legend(frameon=False, fontsize=9, ncols=2, loc="outside lower center")
        return svg_element(figure, f"Accuracy by the number of labels. {worth.sentence}")


def _rows(worth: Worth, arms: list[str]) -> list[dict[str, Any]]:
    """A row for each number of labels with the point of each arm."""
    rows = []
    for labels in sorted({point.labels for point in worth.points}):
        points = [worth.point(arm, labels) for arm in arms]
        amount = next(point.amount for point in points if point is not None)
        rows.append({"labels": labels, "amount": amount, "points": points})
    return rows


def _needed_text(gain: Gain) -> str:
    """The labels that scratch needs, in a few words."""
    labels = f"{round(gain.needed.labels):,}"
    if gain.needed.above:
        return f"more than {labels}"
    return f"at most {labels}" if gain.needed.below else f"about {labels}"
