"""What `psm worth` prints."""

from rich.console import Console
from rich.table import Table

from psm.finetuning.worth.analysis import Gain, LabelsNeeded, Worth
from psm.finetuning.worth.cells import TITLES


def worth_table(worth: Worth) -> None:
    """A row for each number of labels, a column for each way, and the labels saved."""
    arms = [arm for arm in TITLES if any(point.arm == arm for point in worth.points)]
    table = Table("labels", *(TITLES[arm] for arm in arms), "gain", "labels saved", caption="top-1 in %, 95 % interval")
    gains = {gain.labels: gain for gain in worth.gains}
    for labels in sorted({point.labels for point in worth.points}):
        points = [worth.point(arm, labels) for arm in arms]
        amount = next(point.amount for point in points if point is not None)
        cells = [f"{p.top1:.1f} ({p.interval.low:.1f} to {p.interval.high:.1f})" if p else "–" for p in points]
        gain = gains.get(labels)
        table.add_row(f"{labels:,} ({amount})", *cells, f"{gain.gain:+.1f}" if gain else "–", saved_text(gain))
    Console().print(table)


def saved_text(gain: Gain | None) -> str:
    """Labels saved with their interval, in a few words."""
    if gain is None:
        return "–"
    if gain.needed.above and gain.saved == 0:
        return "unknown"
    more = "more than " if gain.needed.above else "about " if gain.saved else ""
    low, high = (_end(needed, gain.labels) for needed in gain.needed_interval)
    return f"{more}{gain.saved:,} ({low} to {high})"


def _end(needed: LabelsNeeded, labels: int) -> str:
    saved = max(0, round(needed.labels) - labels)
    return f"over {saved:,}" if needed.above else f"{saved:,}"
