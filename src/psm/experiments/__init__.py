"""The paper's tables and figures as commands: a catalog of experiments, a runner, and pages of results."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from psm.experiments.catalog import EXPERIMENTS, Configuration, Experiment
from psm.experiments.presets import PRESETS, Preset

if TYPE_CHECKING:
    from psm.experiments.runner import SuiteResult

__all__ = ["EXPERIMENTS", "PRESETS", "Configuration", "Experiment", "Preset", "report", "run"]


def run(*names: str, config: Mapping[str, Any] | None = None, **keys: Any) -> "SuiteResult":
    """Run experiments by name, or ``all``; the keys are those of `psm experiment run`, nested ones as dictionaries.

    Examples:
        >>> run("table1", preset="smoke", out="study", optim={"lr": 0.2})  # doctest: +SKIP
    """
    from psm.experiments.plan import read_request
    from psm.experiments.runner import run_experiments

    return run_experiments(read_request(names, config or {}, keys))


def report(out: str | Path) -> Path:
    """Write the pages of a study from its CSV files; gives the index page.

    Examples:
        >>> report("study")  # doctest: +SKIP
    """
    from psm.experiments.report import write_report
    from psm.experiments.results import Study

    return write_report(Study(Path(out).expanduser()))
