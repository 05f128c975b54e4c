"""Contenders in processes of their own, timed in turns: each waits while another works.

A contender is a script that reads a number of steps from its standard input, a line at a time, takes so many steps and
answers with the seconds they took. Environments may differ, the machine and its mood are shared.
"""

import json
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"


@dataclass
class Contender:
    """A process that takes steps when it is told to."""

    command: list[str]
    environment: dict[str, str]
    process: subprocess.Popen = field(init=False)

    def __post_init__(self) -> None:
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(self.command, stdin=pipe, stdout=pipe, text=True, env=self.environment)

    def seconds(self, steps: int) -> float:
        """How long so many steps take."""
        self.process.stdin.write(f"{steps}\n")
        self.process.stdin.flush()
        while line := self.process.stdout.readline():
            if line.startswith("seconds "):
                return float(line.split()[1])
        raise SystemExit(f"{' '.join(self.command)} gave up")

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()


def answer(step: Callable[[], object]) -> None:
    """The contender's side: take steps as told until nobody asks any more."""
    while True:
        try:
            steps = int(input())
        except EOFError:
            return
        start = time.perf_counter()
        for _ in range(steps):
            step()
        print(f"seconds {time.perf_counter() - start}", flush=True)


def in_turns(contenders: dict[str, Callable[[], float]], turns: int) -> dict[str, list[float]]:
    """What each contender gives in each turn; the first turn warms up and is dropped."""
    given: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(turns + 1):
        for name, measure in contenders.items():
            given[name].append(measure())
    return {name: values[1:] for name, values in given.items()}


def timed(work: Callable[[], object]) -> float:
    """Seconds that it takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def beside_torch(name: str, torchs: Callable[[], float], own: Callable[[], float], turns: int) -> dict:
    """What something takes by torch's functions and by psm's own, seconds each, as a line and as a row of results."""
    seconds = in_turns({"torch": torchs, "psm": own}, turns)
    ratio = spread([slow / fast for slow, fast in zip(seconds["torch"], seconds["psm"], strict=True)])
    milliseconds = {way: 1e3 * spread(values)["median"] for way, values in seconds.items()}
    print(f"{name:58} {milliseconds['torch']:>9.2f} {milliseconds['psm']:>9.2f}  {shown(ratio):>20}", flush=True)
    return {"of": name, "ms": milliseconds, "times as fast": ratio}


def spread(values: list[float]) -> dict[str, float]:
    """Median, least and most."""
    return {"median": statistics.median(values), "least": min(values), "most": max(values)}


def shown(values: dict[str, float], digits: int = 2) -> str:
    return f"{values['median']:.{digits}f} ({values['least']:.{digits}f} - {values['most']:.{digits}f})"


def keep(name: str, result: object) -> None:
    """Leave the figures where `python benchmarks/publish.py` finds them."""
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")


def kept_before(name: str) -> Any:
    """What an earlier run left there; an empty list if there was none."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else []
