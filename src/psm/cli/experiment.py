"""`psm experiment list | run | report`: parse, call, print. Nothing heavy is imported before it is needed."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from psm.config import merge as settings
from psm.config.schema import ExperimentConfig as Config
from psm.config.schema import PretrainConfig
from psm.experiments.catalog import EXPERIMENTS
from psm.experiments.plan import Request, check_keys, make_plan, read_request
from psm.experiments.presets import PRESETS
from psm.utils.errors import UserError, did_you_mean

WORDS = ("list", "run", "report")


def run(arguments: Sequence[str]) -> int:
    """Do what the first word says; 1 when a run failed."""
    if not arguments:
        raise UserError("`psm experiment` needs a word: list, run NAME... or report; see `psm experiment --help`.")
    word, *rest = arguments
    if word not in WORDS:
        hint = did_you_mean(word, WORDS)
        raise UserError(f"{word!r} is not a word of `psm experiment`{hint}: choose one of {', '.join(WORDS)}.")
    names = [argument for argument in rest if "=" not in argument]
    request = read_request(names, *_parse([argument for argument in rest if "=" in argument]))
    return {"list": _list, "run": _run, "report": _report}[word](request)


def _parse(arguments: Sequence[str]) -> tuple[dict[str, Any], ...]:
    """Overrides from `key=value` arguments, each read by the command that it is a key of."""
    check_keys(argument.partition("=")[0] for argument in arguments)
    own = {row.key for row in settings.rows(Config)}
    mine = [
        argument
        for argument in arguments
        if (key := argument.partition("=")[0]) in {*own, "config"} or key.startswith("slurm.")
    ]
    runs = [argument for argument in arguments if argument not in mine]
    *files, given = settings.parse(mine, Config)
    return (*files, given, *settings.parse(runs, PretrainConfig))


def _run(request: Request) -> int:
    if not request.names:
        raise UserError(f"name what to run: {', '.join(EXPERIMENTS)} or all, for example `psm experiment run table1`.")
    from psm.experiments.report import write_report
    from psm.experiments.runner import run_experiments

    outcome = run_experiments(request)
    print(f"results: {outcome.study.csv('results')}")
    print(f"pages:   {write_report(outcome.study)}")
    if outcome.failed:
        print(
            f"psm: {len(outcome.failed)} of {len(outcome.plan.runs)} runs failed, see "
            f"{outcome.study.csv('failures')}; the same command tries them again.",
            file=sys.stderr,
        )
    return 1 if outcome.failed else 0


def _report(request: Request) -> int:
    from psm.experiments.report import write_report
    from psm.experiments.results import Study

    print(f"pages: {write_report(Study(Path(request.config.out).expanduser()))}")
    return 0


def _list(request: Request) -> int:
    from rich.console import Console
    from rich.table import Table

    table = Table("experiment", "rows", "runs", "question", title=f"Experiments, preset {request.config.preset}")
    plan = make_plan(replace(request, names=tuple(EXPERIMENTS)))
    names = {run.name for run in plan.runs}
    shared: set[str] = set()
    for row in EXPERIMENTS.values():
        runs = {entry.run for entry in plan.entries if entry.experiment == row.name} & names
        shared |= runs if row.in_all else set()
        table.add_row(row.name, str(len(row.configurations)), str(len(runs)), f"{row.title}. {row.question}")
    paper = "The paper's tables and figures. Runs that several experiments need are trained once."
    table.add_row("all", "", str(len(shared)), paper)
    console = Console()
    console.print(table)
    scales = Table("preset", "what it is", "takes", title="Presets")
    for preset in PRESETS.values():
        scales.add_row(preset.name, preset.title, preset.takes)
    console.print(scales)
    return 0
