"""`psm runs [list | best | compare | serve]`: parse, call, print."""

from collections.abc import Sequence
from pathlib import Path

from psm.config import merge as settings
from psm.config.runs import RunsConfig as Config
from psm.utils.errors import UserError

WORDS = ("list", "best", "compare", "serve")


def run(arguments: Sequence[str]) -> None:
    plain = [argument for argument in arguments if "=" not in argument]
    word = plain.pop(0) if plain and plain[0] in WORDS else "list"
    config = settings.build(Config, *settings.parse([one for one in arguments if "=" in one], Config))
    if word == "compare":
        _compare(plain)
        return
    if len(plain) > 1:
        raise UserError(f"`psm runs {word}` takes one folder, not {len(plain)}: {', '.join(plain)}.")
    {"list": _list, "best": _best, "serve": _serve}[word](
        Path(plain[0] if plain else config.folder).expanduser(), config
    )


def _list(folder: Path, config: Config) -> None:
    from psm.reporting.runs.summary import find_runs
    from psm.reporting.runs.table import print_runs, sorted_runs

    print_runs(sorted_runs(find_runs(folder), config.sort, config.by), config.by)


def _best(folder: Path, config: Config) -> None:
    from psm.reporting.runs.summary import find_runs
    from psm.reporting.runs.table import best_run

    print(best_run(find_runs(folder), config.by).folder)


def _serve(folder: Path, config: Config) -> None:
    from psm.reporting.runs.serve import serve

    serve(folder, config.port)


def _compare(folders: Sequence[str]) -> None:
    from psm.reporting.runs.summary import summarize
    from psm.reporting.runs.table import print_comparison

    if len(folders) != 2:
        raise UserError(
            f"`psm runs compare` takes two run folders, not {len(folders)}: psm runs compare runs/a runs/b."
        )
    paths = [Path(folder).expanduser() for folder in folders]
    for path in paths:
        if not (path / ".psm").exists():
            raise UserError(f"{path} is no run folder: give two that psm pretrain wrote.")
    print_comparison(
        *(summarize(path, Path()) if not path.is_absolute() else summarize(path, path.parent) for path in paths)
    )
