"""Folders that turn read-only, vanish or change in the middle of a run."""

import shutil
from collections.abc import Callable
from pathlib import Path

from helpers import save_images
from torture.case import Case, Context, Outcome, Scale
from torture.kills import compare
from torture.processes import Ended, Moment, Running
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
    """What is written to may not be written any more. Root may write everywhere, so the work gives up that right."""
    folder = context.folder / "work"
    work.prepare(folder, context.shared)
    running, reached = _until(context, work, whole, folder, obedient=True)
    protected = [path for name in (work.writes, "cache") for path in _folders(folder / name)]
    for path in protected:
        path.chmod(0o555)
    ended = running.end()
    outcome = _end_is_a_sentence(Outcome({"hit": int(reached)}), ended, "read-only")
    for path in protected:
        path.chmod(0o755)
    outcome.failures += partial(folder)
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
    context: Context, work: Work, whole: Reference, folder: Path, obedient: bool = False
) -> tuple[Running, bool]:
    """The work, started, at a random moment of it; False if it had ended before."""
    moment = Moment(cpu=context.random("moment").random() * whole.cpu)
    running = Running(work.first(folder), folder / "process", obedient=obedient)
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
