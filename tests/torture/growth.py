"""Memory, file handles and threads over a long run, and over many short runs in one process."""

import os
import shutil
import signal
import time
from pathlib import Path
from statistics import median
from typing import Any

from helpers import SMALL
from torture.case import Case, Context, Outcome, Scale
from torture.processes import Running, Usage, call, usage
from torture.works import small_arguments

KIND = "growth"
ALLOWED = 30.0  # MB of growth after the warm-up that count as none: an allocator's slack
SHARE = 0.03


def cases(scale: Scale) -> list[Case]:
    """The long run first: it takes as long as it takes."""
    soak, count = scale.soak_seconds, scale.short_runs
    return [
        Case(KIND, f"long-run-{soak:.0f}s", lambda context: long_run(context, soak), soak),
        Case(KIND, f"{count}-short-runs", lambda context: short_runs(context, count), 1.5 * count),
    ]


def long_run(context: Context, seconds: float) -> Outcome:
    """A training run of so many seconds, with checkpoints, metrics and nearest neighbors all along."""
    out = context.folder / "run"
    keys = [*small_arguments(), "epochs=100000000", "save.every_steps=7", "monitor.linear=true", f"out={out}"]
    running = Running(["pretrain", *keys], context.folder / "process")
    samples: list[Usage] = []
    said = 0.0
    every = max(0.25, seconds / 2000)
    while running.process.is_alive() and running.seconds() < seconds:
        time.sleep(every)
        now = usage(running.pid)
        if now is not None and (out / "metrics.jsonl").exists():
            samples.append(now)
        if samples and running.seconds() - said > 300:
            said = running.seconds()
            context.say(f"{KIND}: {said / 60:.0f} minutes, {samples[-1]}")
    cpu = running.cpu_seconds()
    if running.process.is_alive():
        os.kill(running.pid, signal.SIGTERM)
    ended = running.end(seconds + 300)
    epochs = (out / "metrics.jsonl").read_text().count("\n") if (out / "metrics.jsonl").exists() else 0
    outcome = Outcome({"seconds": round(seconds), "cpu_seconds": round(cpu), "epochs": epochs})
    outcome.expect(ended.code == 143, f"the run ended with code {ended.code}: {ended.stderr[-300:]}")
    return _judge(outcome, samples)


def short_runs(context: Context, count: int) -> Outcome:
    """Many runs, scores and embeddings in one process."""
    samples = call(_many_runs, count, context.folder / "runs", folder=context.folder / "process", timeout=4 * 3600)
    return _judge(Outcome({"runs": count}), [Usage(*sample) for sample in samples])


def _many_runs(count: int, folder: Path) -> list[tuple[float, int, int]]:
    import logging

    import psm

    logging.disable(logging.WARNING)
    samples = []
    for number in range(count):
        keys: dict[str, Any] = {**SMALL, "epochs": 1, "seed": number, "monitor": {"knn": number % 3 == 0}}
        out = folder / str(number)
        psm.pretrain(out, **keys)
        if number % 5 == 0:
            psm.evaluate(out, linear={"epochs": 1}, images={"limit": 60}, progress=False)
        shutil.rmtree(out)
        held = usage()
        assert held is not None
        samples.append((held.rss, held.handles, held.threads))
    return samples


def _judge(outcome: Outcome, samples: list[Usage]) -> Outcome:
    """Growth from the second quarter to the last: what a process takes in its first quarter is its warm-up."""
    quarter = len(samples) // 4
    outcome.expect(quarter >= 4, f"only {len(samples)} samples were taken")
    if quarter < 1:
        return outcome
    early, late = samples[quarter : 2 * quarter], samples[-quarter:]
    before, after = (median(sample.rss for sample in part) for part in (early, late))
    outcome.figures |= {
        "samples": len(samples),
        "rss_mb": [round(before, 1), round(after, 1)],
        "handles": [max(sample.handles for sample in part) for part in (early, late)],
        "threads": [max(sample.threads for sample in part) for part in (early, late)],
    }
    allowed = max(ALLOWED, SHARE * before)
    outcome.expect(after - before <= allowed, f"memory grew from {before:.1f} to {after:.1f} MB")
    for name in ("handles", "threads"):
        first, last = outcome.figures[name]
        outcome.expect(last <= first, f"{name} grew from {first} to {last}")
    return outcome
