"""Figures as SVG that take the colors of the page: ink and grid are its text color, the background is its own."""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

from psm.reporting.style import BLUE, GRAY, GREEN, ORANGE

# Colors of the curves by the names that pages may give other values to, for example on a dark ground.
_LINES = {BLUE: "blue", ORANGE: "orange", GREEN: "green", GRAY: "gray"}
_INK = "#010203"  # stands for the page's text color until the SVG is written


@contextmanager
def page_colors(name: str = "psm") -> Iterator[None]:
    """Figures that are made and written within take the page's colors; equal figures of a name give equal files."""
    colored = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color", "grid.color")
    settings: Any = {**dict.fromkeys(colored, _INK), "svg.hashsalt": name}
    with rc_context(settings):
        yield


def svg_element(figure: Figure, label: str) -> str:
    """A figure as an SVG element, with what it shows in words for those who cannot see it."""
    stream = io.StringIO()
    figure.savefig(stream, format="svg", transparent=True, metadata={"Date": None})
    text = stream.getvalue()
    text = text[text.index("<svg") :].replace(_INK, "currentColor")
    for color, name in _LINES.items():
        text = text.replace(color.lower(), f"var(--plot-{name}, {color.lower()})")
    words = label.replace("&", "&amp;").replace("<", "&lt;").replace('"', "&quot;")
    return text.replace("<svg ", f'<svg role="img" aria-label="{words}" ', 1)
