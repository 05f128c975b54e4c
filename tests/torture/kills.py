"""SIGKILL at random moments of real runs: every one continues to what the uninterrupted run gives."""

import os
import signal
import time
from pathlib import Path
from random import Random

from torture.case import Case, Context, Outcome, Scale
from torture.processes import Moment, Running
from torture.works import WORKS, Reference, Work, partial, reference

KIND = "kills"
KILLS = 2  # in one case: the run, and its continuation


def cases(scale: Scale) -> list[Case]:
    seconds = {"suite": 40.0}
    return [
        Case(KIND, f"{work}-{number}", lambda context, w=WORKS[work]: killed(context, w), seconds.get(work, 9.0))  # type: ignore[misc]
        for work, count in zip(WORKS, scale.kill_cases, strict=True)
        for number in range(count)
    ]


def killed(context: Context, work: Work) -> Outcome:
    """Kill a work, look at what it left, kill its continuation, let the next one finish, compare."""
    whole = reference(work, context.shared)
    outcome, draw = Outcome({"kills": 0, "moments": []}), context.random("kill")
    work.prepare(context.folder, context.shared)
    for number in range(KILLS):
        arguments = work.first(context.folder) if number == 0 else work.again(context.folder)
        moment = draw_moment(draw, work, whole)
        running = Running(arguments, context.folder / "process", write=moment.write)
        reached = True
        if moment.write is None:
            reached = running.reaches(moment)
            if reached and work.name == "suite" and draw.random() < 0.5:
                reached = _kill_worker(running)
            elif reached:
                running.process.kill()
        ended = running.end()
        if ended.killed or (reached and work.name == "suite" and ended.code == 1):
            outcome.figures["kills"] += 1
            outcome.figures["moments"].append(str(moment))
        else:
            outcome.expect(ended.code == 0, f"{moment}: it ended by itself with {ended.code}: {ended.stderr[-500:]}")
        for problem in partial(context.folder):
            outcome.failures.append(f"killed {moment}: {problem}")
        if ended.code == 0:  # it was quicker than its end: nothing is left to continue
            break
    else:
        ended = Running(work.again(context.folder), context.folder / "process").end()
    outcome.expect(ended.code == 0, f"the last continuation ended with {ended.code}: {ended.stderr[-800:]}")
    if ended.code == 0:
        compare(outcome, work, whole, context.folder)
    return outcome


def compare(outcome: Outcome, work: Work, whole: Reference, folder: Path) -> None:
    """Note every part of the outcome that differs from that of the uninterrupted work."""
    found = work.outcome(folder)
    for name, value in whole.outcome.items():
        outcome.expect(found[name] == value, f"{name} differs: {found[name]!s:.200} instead of {value!s:.200}")
    outcome.failures += partial(folder)


def draw_moment(draw: Random, work: Work, whole: Reference) -> Moment:
    """Half of the kills come at a random time, half before a random change of a file."""
    if draw.random() < 0.5:
        return Moment(write=draw.randint(1, max(1, whole.writes)))
    share = draw.random()
    return Moment(wall=share * whole.seconds) if work.name == "suite" else Moment(cpu=share * whole.cpu)


def _kill_worker(suite: Running) -> bool:
    """Kill the process that a suite has started; False if there is none. The suite then goes on to its end."""
    for _ in range(400):
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and _parent(entry) == suite.pid:
                os.kill(int(entry.name), signal.SIGKILL)
                return True
        if not suite.process.is_alive():
            return False
        time.sleep(0.05)
    return False


def _parent(process: Path) -> int:
    try:
        return int((process / "stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, ValueError, IndexError):
        return -1
