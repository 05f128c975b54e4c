"""Seconds of training until nearest neighbors are right for so many per cent of test images: psm beside lightly.

    bash benchmarks/make-peers PEERS
    python benchmarks/time_to_accuracy.py --peers PEERS --root data

CIFAR-10, the tiny encoder, batch 64, one schedule (warm-up and cosine) for all; with four views 32 images a step, so
that as many images are seen. Each contender runs in a process of its own; they take turns of as many images, and are
scored after each turn by the same function, which is not timed: nearest neighbors among all training images. A
contender stops at the highest accuracy that is asked for, or at the end of its schedule. What is there of a seed and a
schedule is not measured again. Six epochs are a little more than SimCLR needs for 50 %; BYOL needs about twenty for it,
and so does SimCLR for 60 %: `--epochs 20 --targets 50 60`, hours.
"""

import argparse
import os
import sys
import tempfile
from pathlib import Path

import torch

from accuracy_tables import seconds_to
from pipeline import HERE, best_workers
from psm.config.schema import ImagesConfig
from psm.data import load_dataset
from psm.data.stats import channel_statistics
from turns import Contender, keep, kept_before, shown, spread

NAME = "time_to_accuracy"
BATCH, ENCODER = 64, "tiny"
CONTENDERS = {  # name -> method, views
    "psm/simclr": ("simclr", 2),
    "lightly/simclr": ("simclr", 2),
    "psm/byol": ("byol", 2),
    "lightly/byol": ("byol", 2),
    "psm/psm": ("psm", 2),
    "psm/hcl": ("hcl", 2),
    "psm/psmv2": ("psmv2", 2),
    "psm/psmv2-4-views": ("psmv2", 4),
}


class Scored(Contender):
    """A contender that says its score after each turn."""

    def turn(self, steps: int) -> tuple[float, float] | None:
        """Seconds of so many steps and the score after them; None at the end of the schedule."""
        self.process.stdin.write(f"{steps}\n")
        self.process.stdin.flush()
        score = None
        while line := self.process.stdout.readline():
            if line.startswith("score "):
                score = float(line.split()[1])
            if line.startswith("seconds "):
                return float(line.split()[1]), score
        return None


def batch_of(contender: str) -> int:
    """Images of a step: as many views for all."""
    return 2 * BATCH // CONTENDERS[contender][1]


def start(contender: str, seed: int, path: Path, options: argparse.Namespace, workers: int) -> Scored:
    library, (method, views) = contender.partition("/")[0], CONTENDERS[contender]
    if library == "psm":
        batch = batch_of(contender)
        arguments = (method, views, ENCODER, batch, options.threads, options.epochs, options.lr, seed, path)
        python = sys.executable
    else:
        steps = options.epochs * (options.images // BATCH)
        arguments = (method, ENCODER, BATCH, options.threads, workers, steps, options.lr, seed, path)
        python = str(options.peers / "bin" / "python")
    environment = os.environ | {"PYTHONPATH": str(HERE.parent / "src"), "OMP_NUM_THREADS": str(options.threads)}
    script = HERE / "contenders" / f"{library}_to_accuracy.py"
    return Scored([python, "-W", "ignore", str(script), *map(str, arguments)], environment)


def race(seed: int, path: Path, options: argparse.Namespace, workers: int) -> dict[str, list[tuple[int, float, float]]]:
    """Of each contender after each turn: steps, seconds so far, score."""
    running = {name: start(name, seed, path, options, workers) for name in options.contenders}
    curves: dict[str, list[tuple[int, float, float]]] = {name: [] for name in running}
    try:
        while running:
            for name, process in list(running.items()):
                steps = options.steps * BATCH // batch_of(name)
                found = process.turn(steps)
                before = curves[name][-1] if curves[name] else (0, 0.0, 0.0)
                if found:
                    point = (before[0] + steps, before[1] + found[0], found[1])
                    curves[name].append(point)
                    print(f"seed {seed} {name:18} {point[0]:6} steps {point[1]:8.1f} s  kNN {point[2]:.2f}", flush=True)
                if found is None or found[1] >= max(options.targets):
                    running.pop(name).stop()
    finally:
        for process in running.values():
            process.stop()
    return curves


def prepare(options: argparse.Namespace, path: Path) -> None:
    data = load_dataset("cifar10", ImagesConfig(root=options.root, limit=options.images))
    mean, std = channel_statistics(data.train)
    splits = {"train": data.train, "test": data.test}
    tensors = {name: split.take(torch.arange(len(split))) for name, split in splits.items()}
    labels = {f"{name}_labels": torch.as_tensor(split.labels) for name, split in splits.items()}
    torch.save(tensors | labels | {"mean": torch.as_tensor(mean), "std": torch.as_tensor(std)}, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--peers", type=Path, required=True, help="environment made by benchmarks/make-peers")
    parser.add_argument("--root", default="data", help="folder that holds CIFAR-10")
    parser.add_argument("--contenders", nargs="+", default=list(CONTENDERS), choices=list(CONTENDERS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--targets", type=float, nargs="+", default=[50.0])
    parser.add_argument("--images", type=int, default=50_000)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--lr", type=float, default=0.06)
    parser.add_argument("--steps", type=int, default=390, help="of a turn with two views")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    options = parser.parse_args()
    rows = kept_before(NAME)
    workers = best_workers(str(options.peers / "bin" / "python"), options.threads, "simclr", ENCODER, "cifar", BATCH)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "images.pt"
        prepare(options, path)
        for seed in options.seeds:
            scale = {"seed": seed, "epochs": options.epochs, "images": options.images, "lr": options.lr}
            there = {row["contender"] for row in rows if scale.items() <= row.items()}
            if there >= set(options.contenders):
                continue
            found = race(seed, path, options, workers)
            rows = [row for row in rows if row["contender"] not in found or not scale.items() <= row.items()]
            rows += [{"contender": name, **scale, "curve": curve} for name, curve in found.items()]
            keep(NAME, rows)
    for target in options.targets:
        for name in options.contenders:
            of_schedule = [row for row in rows if (row["contender"], row["epochs"]) == (name, options.epochs)]
            times = [seconds_to(row["curve"], target) for row in of_schedule]
            reached = [seconds for seconds in times if seconds is not None]
            words = shown(spread(reached), 0) if reached else "never"
            print(f"kNN {target:.0f} %  {name:18} {words}  ({len(reached)} of {len(times)} seeds)")


if __name__ == "__main__":
    main()
