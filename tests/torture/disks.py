"""A small file system that fills up in the middle of a run."""

import subprocess
from pathlib import Path

from torture.case import Case, Context, Outcome, Scale, Skipped
from torture.kills import compare
from torture.processes import Running
from torture.works import WORKS, Work, partial, reference

KIND = "disks"
LIKELY = ("pretrain", "cache", "embed", "pretrain", "evaluate")  # in turns; a suite stands for many small files


def cases(scale: Scale) -> list[Case]:
    works = [LIKELY[number % len(LIKELY)] for number in range(scale.disks - 1)] + ["suite"]
    return [
        Case(KIND, f"{work}-{number}", lambda context, w=WORKS[work]: full_disk(context, w), 15.0)  # type: ignore[misc]
        for number, work in enumerate(works)
    ]


def full_disk(context: Context, work: Work) -> Outcome:
    """Run a work where it has too little space, look at what it left, give it space, let it continue, compare."""
    whole = reference(work, context.shared)
    disk = context.folder / "disk"
    share = context.random("disk").uniform(0.02, 1.0)
    outcome = Outcome({"mb": 0.0, "full": 0})
    with mounted(disk, 400_000_000):
        work.prepare(disk / "work", context.shared)
        used = sum(path.stat().st_blocks * 512 for path in disk.rglob("*") if path.is_file())
        room = max(int(share * whole.bytes), 8192)
        outcome.figures["mb"] = round(room / 1e6, 2)
        _resize(disk, used + room)
        ended = Running(work.first(disk / "work"), context.folder / "process").end()
        outcome.figures["full"] = int(ended.code == 1)
        outcome.expect(not ended.crashed, f"with {room:,} bytes free: {ended.crashed}")
        outcome.expect(ended.code in (0, 1), f"with {room:,} bytes free: code {ended.code}: {ended.stderr[-300:]}")
        if ended.code == 1 and work.name != "suite":
            outcome.expect("full" in ended.sentence or "free" in ended.sentence, f"it said: {ended.stderr[-300:]}")
        outcome.failures += [f"with {room:,} bytes free: {problem}" for problem in partial(disk / "work")]
        _resize(disk, 400_000_000)
        again = Running(work.again(disk / "work"), context.folder / "process").end()
        outcome.expect(again.code == 0, f"with space again: code {again.code}: {again.stderr[-500:]}")
        if again.code == 0:
            compare(outcome, work, whole, disk / "work")
    return outcome


class mounted:
    """A file system in memory of so many bytes at a folder, for the time of a block."""

    def __init__(self, folder: Path, size: int):
        self.folder, self.size = folder, size

    def __enter__(self) -> Path:
        self.folder.mkdir(parents=True)
        command = ["mount", "-t", "tmpfs", "-o", f"size={self.size}", "tmpfs", str(self.folder)]
        try:
            done = subprocess.run(command, capture_output=True).returncode == 0
        except OSError:
            done = False
        if not done:
            raise Skipped("mounting a small file system is not allowed here: it takes root")
        return self.folder

    def __exit__(self, *error: object) -> None:
        subprocess.run(["umount", "--lazy", str(self.folder)], check=True)


def _resize(folder: Path, size: int) -> None:
    subprocess.run(["mount", "-o", f"remount,size={size}", str(folder)], check=True, capture_output=True)
