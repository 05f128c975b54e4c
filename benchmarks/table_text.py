"""Tables of the figures in benchmarks/results, as Markdown."""

import json
from collections.abc import Iterable
from typing import Any

from turns import RESULTS


def read(name: str) -> Any:
    """The figures that a benchmark left."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def figure_of(values: dict[str, float], digits: int = 1) -> str:
    """Median (least – most)."""
    low, middle, high = (f"{values[name]:,.{digits}f}" for name in ("least", "median", "most"))
    return f"{middle} ({low} – {high})"


def table(head: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """Rows below a head."""
    head = list(head)
    lines = (head, ["---"] * len(head), *rows)
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)
