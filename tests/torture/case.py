"""A case of the harness: something that is done to psm, seeded, and what has to hold afterwards."""

import random
import shutil
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Scale:
    """How much of everything is done."""

    hours: float = 0.0  # of the long run; 0: a minute of it
    kill_cases: tuple[int, int, int, int, int] = (5, 3, 3, 3, 2)  # pretrain, cache, evaluate, embed, suite
    disks: int = 4
    folders: int = 1  # rounds over everything that can happen to a folder
    mutations: int = 500  # of each kind of file
    short_runs: int = 30
    processes: tuple[int, ...] = (1, 2)
    threads: tuple[int, ...] = (1, 2, 4)

    @property
    def name(self) -> str:
        return f"hours={self.hours:g}" if self.hours else "default"

    @property
    def soak_seconds(self) -> float:
        return self.hours * 3600 if self.hours else 45.0


def full_scale(hours: float) -> Scale:
    """The scale of the figures in docs/reliability.md."""
    return Scale(hours, (24, 12, 10, 10, 6), 16, 4, 10_000, 200, (1, 2, 4))


class Skipped(Exception):
    """A case that cannot be tried on this machine; the message is the reason."""


@dataclass
class Outcome:
    """What came of a case: figures to report, and sentences on what did not hold."""

    figures: dict[str, Any] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    def expect(self, holds: object, sentence: str) -> None:
        if not holds:
            self.failures.append(sentence)


@dataclass(frozen=True)
class Context:
    """What a case works with."""

    folder: Path  # its own, empty
    shared: "Shared"
    seed: int
    say: Callable[[str], None] = print

    def random(self, *purpose: object) -> random.Random:
        """Draws of this case; the same for the same seed and purpose."""
        return random.Random(f"{self.seed} {' '.join(map(str, purpose))}")


@dataclass(frozen=True)
class Case:
    """One entry of the list that the runner works off."""

    kind: str
    name: str
    run: Callable[[Context], Outcome]
    seconds: float  # a guess, for the time left

    @property
    def title(self) -> str:
        return f"{self.kind}/{self.name}"


class Shared:
    """What several cases need and one of them makes: data, trained runs, uninterrupted runs."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._lock = threading.Lock()
        self._locks: dict[str, threading.Lock] = {}
        self._made: dict[str, Any] = {}

    def get(self, name: str, make: Callable[[Path], Any]) -> Any:
        """The thing of that name, made once in a folder of its own."""
        with self._lock:
            lock = self._locks.setdefault(name, threading.Lock())
        with lock:
            if name not in self._made:
                folder = self.folder / name
                shutil.rmtree(folder, ignore_errors=True)  # of an attempt that failed
                folder.mkdir(parents=True)
                self._made[name] = make(folder)
            return self._made[name]
