"""Thousands of mutations of every kind of file that psm reads: read, or refused in a sentence, and nothing else."""

import json
import signal
from pathlib import Path
from typing import Any

from helpers import FORKS
from torture.case import Case, Context, Outcome, Scale
from torture.fuzz import watch
from torture.processes import Stopwatch, call
from torture.targets import TARGETS, make_inputs

KIND = "mutations"
BLOCK = 1000  # mutations of a case
STUCK = 180  # seconds without an answer: longer than one file may take, on a busy machine
ROOT = Path(__file__).resolve().parents[2]


def cases(scale: Scale) -> list[Case]:
    return [
        Case(
            KIND,
            f"{name}-{start}",
            lambda context, n=name, a=start: mutations(context, n, a, min(a + BLOCK, scale.mutations)),  # type: ignore[misc]
            0.012 * min(BLOCK, scale.mutations - start),
        )
        for start in range(0, scale.mutations, BLOCK)  # of every kind some first
        for name in TARGETS
    ]


def mutations(context: Context, name: str, start: int, stop: int) -> Outcome:
    """Read the mutations ``start`` to ``stop`` of a kind; a reader that dies is started again behind that file."""
    inputs = context.shared.get("inputs", lambda folder: _inputs(folder))
    totals: dict[str, Any] = {"files": 0, "read": 0, "refused": 0, "grown_mb": 0, "slowest": 0.0}
    outcome = Outcome(totals)
    at, tries = start, 0
    while at < stop and tries < 5:
        folder = context.folder / str(at)
        folder.mkdir()
        died = _read(name, inputs, f"{context.seed}", at, stop, folder)
        if died:
            tries += 1
            place = int.from_bytes((folder / "at").read_bytes(), "little") if (folder / "at").exists() else at
            outcome.failures.append(f"mutation {place} of {name}: {died}")
            at = place + 1
            continue
        result = json.loads((folder / "result.json").read_text())
        for kind, count in result["counts"].items():
            totals[kind] += count
            totals["files"] += count
        totals["grown_mb"] = max(totals["grown_mb"], result["grown_mb"])
        totals["slowest"] = max(totals["slowest"], result["slowest"])
        for problem in result["problems"]:
            totals["files"] += 1
            outcome.failures.append(f"mutation {problem['index']} of {name}: {problem['kind']}: {problem['said']}")
        at = result["next"]
        tries += bool(result["problems"])
    return outcome


def _inputs(folder: Path) -> dict[str, Path]:
    return call(make_inputs, folder / "inputs", ROOT, folder=folder / "process")


def _read(name: str, inputs: Any, seed: str, start: int, stop: int, folder: Path) -> str:
    """Read in a process of its own; says how that died, or nothing."""
    process = FORKS.Process(target=watch, args=(TARGETS[name], inputs, seed, start, stop, folder))
    process.start()
    last, seconds = -1, Stopwatch()
    while process.is_alive():
        process.join(1.0)
        at = (folder / "at").read_bytes() if (folder / "at").exists() else b""
        now = int.from_bytes(at, "little")
        if now != last:
            last, seconds = now, Stopwatch()
        elif seconds() > STUCK:
            process.kill()
            process.join()
            return f"no answer within {STUCK} s"
    code = process.exitcode or 0
    if code < 0:
        return f"the process died of {signal.Signals(-code).name}"
    return "" if (folder / "result.json").exists() else f"the reading process ended with code {code}"
