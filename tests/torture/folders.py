"""Folders that turn read-only, vanish or change in the middle of a run."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from helpers import save_images
from torture.case import Case, Context, Outcome, Scale
from torture.kills import compare
from torture.processes import NOBODY, Ended, Moment, Running
from torture.works import WORKS, Reference, Work, partial, reference

KIND = "folders"


def cases(scale: Scale) -> list[Case]:
    return [
        Case(KIND, f"{happening}-{work}-{number}", lambda context, h=happening, w=work: harm(context, h, w), 10.0)  # type: ignore[misc]
        for number in range(scale.folders)
        for happening, (_, works) in HAPPENINGS.items()
        for work in works
    ]


def harm(context: Context, happening: str, name: str) -> Outcome:
    """Let something happen to a folder at a random moment of a work; look at its end, undo it, continue, compare."""
    return HAPPENINGS[happening][0](context, WORKS[name], reference(WORKS[name], context.shared))


def _read_only(context: Context, work: Work, whole: Reference) -> Outcome:
    """What is written to may not be written any more. Root may write everywhere, so the work runs as nobody."""
    root = os.geteuid() == 0
    folder = context.folder / "work"
    work.prepare(folder, context.shared)
    (folder / "process").mkdir()
    if root:
        _open_the_way(context.folder)
        _each(folder, lambda path: os.chown(path, NOBODY, NOBODY))
    running, reached = _until(context, work, whole, folder, NOBODY if root else None)
    protected = [path for name in (work.writes, "cache") for path in _folders(folder / name)]
    for path in protected:
        path.chmod(0o555)
    ended = running.end()
    outcome = _end_is_a_sentence(Outcome({"hit": int(reached)}), ended, "read-only")
    for path in protected:
        path.chmod(0o755)
    outcome.failures += partial(folder)
    if root:  # goes on as root; what nobody wrote is root's from now on
        _each(folder, lambda path: os.chown(path, 0, 0))
    _goes_on(outcome, context, work, whole, folder)
    return outcome


def _out_vanishes(context: Context, work: Work, whole: Reference) -> Outcome:
    """What is written to is deleted: the command ends in a sentence, or writes what it has to a new folder."""
    folder = context.folder / "work"
    work.prepare(folder, context.shared)
    running, reached = _until(context, work, whole, folder)
    shutil.rmtree(folder / work.writes, ignore_errors=True)
    ended = running.end()
    outcome = _end_is_a_sentence(Outcome({"hit": int(reached)}), ended, "deleted")
    outcome.failures += partial(folder)
    return outcome


def _data_vanishes(context: Context, work: Work, whole: Reference) -> Outcome:
    """The images are moved away, and come back."""
    folder = context.folder / "work"
    work.prepare(folder, context.shared)
    running, reached = _until(context, work, whole, folder)
    (folder / work.reads).rename(folder / "elsewhere")
    ended = running.end()
    outcome = _end_is_a_sentence(Outcome({"hit": int(reached)}), ended, "images gone")
    outcome.failures += partial(folder)
    (folder / "elsewhere").rename(folder / work.reads)
    if ended.code != 0:
        _goes_on(outcome, context, work, whole, folder)
    return outcome


def _data_changes(context: Context, work: Work, whole: Reference) -> Outcome:
    """Half of the images become others and some become nonsense: it is refused, or finished, never in between."""
    folder = context.folder / "work"
    work.prepare(folder, context.shared)
    running, reached = _until(context, work, whole, folder)
    names = sorted(str(path.relative_to(folder / work.reads)) for path in (folder / work.reads).rglob("*.png"))
    save_images(folder / work.reads, names[::2], seed=7, side=20)
    (folder / work.reads / names[1]).write_bytes(b"not an image")
    (folder / work.reads / names[3]).unlink()
    ended = running.end()
    outcome = _end_is_a_sentence(Outcome({"hit": int(reached)}), ended, "images changed")
    outcome.failures += partial(folder)
    again = Running(work.again(folder), folder / "process").end()
    outcome.expect(not again.crashed, f"continued with other images: {again.crashed}")
    outcome.figures["refused"] = int(again.code == 2)
    return outcome


HAPPENINGS: dict[str, tuple[Callable[[Context, Work, Reference], Outcome], tuple[str, ...]]] = {
    "read-only": (_read_only, ("pretrain", "cache", "evaluate", "embed")),
    "out-vanishes": (_out_vanishes, ("pretrain", "cache", "evaluate", "embed")),
    "data-vanishes": (_data_vanishes, ("cache", "evaluate", "embed")),
    "data-changes": (_data_changes, ("cache", "evaluate", "embed")),
}


def _until(
    context: Context, work: Work, whole: Reference, folder: Path, uid: int | None = None
) -> tuple[Running, bool]:
    """The work, started, at a random moment of it; False if it had ended before."""
    moment = Moment(cpu=context.random("moment").random() * whole.cpu)
    running = Running(work.first(folder), folder / "process", uid=uid, HOME=str(folder))
    return running, running.reaches(moment)


def _end_is_a_sentence(outcome: Outcome, ended: Ended, what: str) -> Outcome:
    outcome.figures["code"] = ended.code
    outcome.expect(not ended.crashed, f"{what}: {ended.crashed}")
    return outcome


def _goes_on(outcome: Outcome, context: Context, work: Work, whole: Reference, folder: Path) -> None:
    ended = Running(work.again(folder), folder / "process").end()
    outcome.expect(ended.code == 0, f"continued: code {ended.code}: {ended.stderr[-500:]}")
    if ended.code == 0:
        compare(outcome, work, whole, folder)


def _folders(folder: Path) -> list[Path]:
    return [folder, *(path for path in folder.rglob("*") if path.is_dir())] if folder.exists() else []


def _each(folder: Path, change: Callable[[Path], object]) -> None:
    for path in (folder, *folder.rglob("*")):
        change(path)


def _open_the_way(folder: Path) -> None:
    """Let others pass through the folders above, as far as they are the harness's own."""
    for path in (folder, *folder.parents):
        if path.stat().st_uid != os.geteuid() or path == path.parent or path.stat().st_mode & 0o005 == 0o005:
            continue
        path.chmod(path.stat().st_mode | 0o055)
