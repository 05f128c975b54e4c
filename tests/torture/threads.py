"""Results with 1, 2 and 4 threads: the same but for rounding."""

from pathlib import Path

from torture.case import Case, Context, Outcome, Scale
from torture.processes import run
from torture.weights import FOLDER, arguments, distances

KIND = "threads"
PRECISIONS = {"float32": "32-true", "float64": "64-true"}
# After the first step and after the last: float32 drifts apart step by step, float64 hardly.
ALLOWED = {"float32": (1e-5, 0.5), "float64": (1e-12, 1e-7)}


def cases(scale: Scale) -> list[Case]:
    return [
        Case(KIND, name, lambda context, n=name: threads(context, n, scale.threads), 12.0)  # type: ignore[misc]
        for name in PRECISIONS
    ]


def threads(context: Context, name: str, counts: tuple[int, ...]) -> Outcome:
    """Train with each number of threads and compare the weights with those of one thread."""
    outcome = Outcome()
    for count in counts:
        kept = context.folder / f"weights-{count}"
        kept.mkdir()
        command = arguments(context.folder / f"run-{count}", PRECISIONS[name])
        ended = run(command, context.folder / "process", threads=count, **{FOLDER: str(kept)})
        outcome.expect(ended.code == 0, f"{count} threads: code {ended.code}: {ended.stderr[-500:]}")
    if not outcome.failures:
        judge(outcome, context.folder, name, counts, "threads")
    return outcome


def judge(outcome: Outcome, folder: Path, name: str, counts: tuple[int, ...], what: str) -> None:
    """Note the distances from the weights of one thread or process; they must be those of rounding."""
    first, last = ALLOWED[name]
    for count in counts[1:]:
        found = distances(folder / f"weights-{counts[0]}", folder / f"weights-{count}")
        outcome.figures[str(count)] = {step: float(f"{value:.1e}") for step, value in found.items()}
        steps = list(found.values())
        outcome.expect(steps[0] <= first, f"{count} {what}, one step: {steps[0]:.1e} apart, {first:.0e} allowed")
        outcome.expect(steps[-1] <= last, f"{count} {what}, all steps: {steps[-1]:.1e} apart, {last:.0e} allowed")
