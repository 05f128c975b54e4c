"""The list of cases, worked off two at a time: a line for each, results as JSON, and what was done is not repeated.

python -m torture [hours=1] [seed=0] [only=kills/pretrain,disks] [jobs=2] [results=FILE] [fresh=true] [list=true]
"""

import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from datetime import UTC, datetime
from importlib import import_module
from json import loads
from pathlib import Path
from typing import Any

from psm.utils.devices import num_cores
from torture.case import Case, Context, Outcome, Scale, Shared, Skipped, full_scale
from torture.processes import end_descendants, save_json

KINDS = ("growth", "kills", "disks", "folders", "mutations", "threads", "devices")
ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "torture.json"
KEYS = ("hours", "seed", "only", "jobs", "results", "fresh", "list", "scratch")


class Report:
    """Prints a line for each case and keeps the results in a file."""

    def __init__(self, path: Path, scale: Scale, seed: int, cases: Sequence[Case], fresh: bool, jobs: int):
        self.path, self.scale, self.seed, self.cases, self.jobs = path, scale, seed, cases, jobs
        about = {"scale": scale.name, "seed": seed}
        before = loads(path.read_text()) if path.exists() and not fresh else {}
        same = all(before.get(name) == value for name, value in about.items())
        self.done: dict[str, dict[str, Any]] = before["cases"] if same and before else {}
        self.machine = _machine()
        self.about: dict[str, Any] = about | {"machine": self.machine}
        self._lock, self._begun = threading.Lock(), time.monotonic()
        self._guessed, self._taken = 0.0, 0.0
        self.failed = 0
        self.closed = False

    @property
    def waiting(self) -> list[Case]:
        """Cases that are not done, or failed the last time."""
        return [case for case in self.cases if self.done.get(case.title, {"failures": [""]})["failures"]]

    def say(self, text: str) -> None:
        with self._lock:
            print(text, flush=True)

    def add(self, case: Case, outcome: Outcome, seconds: float, skipped: str = "") -> None:
        with self._lock:
            if self.closed:
                return
            self.done[case.title] = {
                "figures": outcome.figures,
                "failures": outcome.failures,
                "skipped": skipped,
                "seconds": round(seconds, 1),
                "commit": self.machine["commit"],
            }
            self.path.parent.mkdir(parents=True, exist_ok=True)
            save_json(self.path, self.about | {"date": datetime.now(UTC).isoformat("T", "minutes"), "cases": self.done})
            self._guessed += case.seconds
            self._taken += seconds
            self.failed += bool(outcome.failures)
            left = sum(other.seconds for other in self.waiting) * self._taken / self._guessed / self.jobs
            word = "FAILED" if outcome.failures else "skipped" if skipped else "ok"
            figures = ", ".join(f"{name} {value}" for name, value in outcome.figures.items() if name != "moments")
            finished = len(self.cases) - len(self.waiting)
            print(
                f"[{finished}/{len(self.cases)}] {case.title:28} {word:7} {seconds:7.1f} s  {skipped or figures} "
                f"· {int(left) // 60}:{int(left) % 60:02d} left",
                flush=True,
            )
            for failure in outcome.failures:
                print(f"    {failure}", flush=True)
            if outcome.failures:
                hours = f" hours={self.scale.hours:g}" if self.scale.hours else ""
                repeat = f"python -m torture{hours} seed={self.seed} only={case.title} fresh=true"
                print(f"    repeat with: PYTHONPATH=tests {repeat} results=/tmp/torture.json", flush=True)


def main(arguments: Sequence[str]) -> int:
    """0 if everything held, 1 if something did not, 2 for a mistyped key."""
    given = dict(argument.partition("=")[::2] for argument in arguments)
    unknown = [name for name in given if name not in KEYS]
    if unknown:
        print(f"torture: {unknown[0]} is not a key: there are {', '.join(KEYS)}.", file=sys.stderr)
        return 2
    if sys.platform != "linux":
        print("torture: it reads /proc, which only Linux has: nothing was tried.", file=sys.stderr)
        return 0
    hours, seed, jobs = float(given.get("hours") or 0), int(given.get("seed") or 0), int(given.get("jobs") or 2)
    scale = full_scale(hours) if hours else Scale()
    only = given.get("only", "")
    cases = [case for kind in KINDS for case in import_module(f"torture.{kind}").cases(scale)]
    cases = [case for case in cases if case.title.startswith(tuple(only.split(",")))]
    if not cases:
        print(f"torture: only={only} names no case: see list=true.", file=sys.stderr)
        return 2
    if given.get("list"):
        print("\n".join(case.title for case in cases))
        return 0
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    report = Report(Path(given.get("results", RESULTS)), scale, seed, cases, given.get("fresh") == "true", jobs)
    try:
        with tempfile.TemporaryDirectory(
            prefix="torture-", dir=given.get("scratch"), ignore_cleanup_errors=True
        ) as folder:
            _work(report, Path(folder), jobs)
    except KeyboardInterrupt:
        print(f"torture: stopped; the same command goes on ({report.path})", file=sys.stderr)
        return 130
    print(f"{len(cases)} cases, {report.failed} failed: {report.path}")
    return 1 if report.failed else 0


def _work(report: Report, folder: Path, jobs: int) -> None:
    shared = Shared(folder / "shared")
    with ThreadPoolExecutor(jobs) as pool:
        tasks = [pool.submit(_try, case, report, shared, folder) for case in report.waiting]
        try:
            for task in as_completed(tasks):
                task.result()
        except BaseException:
            report.closed = True  # cases that end now have not been tried
            pool.shutdown(wait=False, cancel_futures=True)
            end_descendants()
            raise


def _try(case: Case, report: Report, shared: Shared, folder: Path) -> None:
    own = folder / case.kind / case.name
    own.mkdir(parents=True)
    begun, skipped = time.monotonic(), ""
    try:
        outcome = case.run(Context(own, shared, _seed(report.seed, case), report.say))
    except Skipped as reason:
        outcome, skipped = Outcome(), str(reason)
    except Exception:
        outcome = Outcome(failures=[f"the harness itself: {traceback.format_exc()[-2000:]}"])
    report.add(case, outcome, time.monotonic() - begun, skipped)
    if not outcome.failures:
        shutil.rmtree(own, ignore_errors=True)


def _seed(seed: int, case: Case) -> int:
    """Of a case alone: a case that is repeated draws what it drew among the others."""
    return zlib.crc32(f"{seed} {case.title}".encode())


def _machine() -> dict[str, str]:
    import torch

    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    commit = subprocess.run(git, capture_output=True, text=True).stdout.strip()
    model = next(
        (x.partition(":")[2].strip() for x in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in x), ""
    )
    return {
        "cpu": model or platform.machine(),
        "cores": str(num_cores()),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "commit": commit,
    }
