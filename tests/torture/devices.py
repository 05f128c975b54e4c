"""Results of 1, 2 and 4 processes: the same but for rounding, in float32 and in float64."""

import os
import subprocess
import sys

from torture.case import Case, Context, Outcome, Scale
from torture.threads import PRECISIONS, judge
from torture.weights import FOLDER, arguments

KIND = "devices"


def cases(scale: Scale) -> list[Case]:
    return [
        Case(KIND, name, lambda context, n=name: devices(context, n, scale.processes), 30.0 * len(scale.processes))  # type: ignore[misc]
        for name in PRECISIONS
    ]


def devices(context: Context, name: str, counts: tuple[int, ...]) -> Outcome:
    """Train with each number of processes and compare the weights with those of one process."""
    outcome = Outcome()
    for count in counts:
        kept = context.folder / f"weights-{count}"
        kept.mkdir()
        keys = [*arguments(context.folder / f"run-{count}", PRECISIONS[name]), f"devices={count}"]
        variables = {"OMP_NUM_THREADS": "1", FOLDER: str(kept), "PSM_CACHE": str(context.folder / "cache")}
        ended = subprocess.run(
            [sys.executable, "-m", "psm", *keys], env=os.environ | variables, capture_output=True, text=True
        )
        outcome.expect(ended.returncode == 0, f"{count} processes: {ended.returncode}: {ended.stderr[-500:]}")
    if not outcome.failures:
        judge(outcome, context.folder, name, counts, "processes")
    return outcome
