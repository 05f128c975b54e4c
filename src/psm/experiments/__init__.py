"""The paper's tables and figures as commands: what is asked, what is run for it, and pages that show the answer.

from psm.experiments import run
run("table1", preset="smoke", out="study")
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from psm.experiments.catalogue import EXPERIMENTS, Configuration, Experiment
from psm.experiments.presets import PRESETS, Preset

if TYPE_CHECKING:
    from psm.experiments.suite import Outcome

__all__ = ["EXPERIMENTS", "PRESETS", "Configuration", "Experiment", "Preset", "run"]


def run(*names: str, config: Mapping[str, Any] | None = None, **keys: Any) -> "Outcome":
    """Run experiments by name, or ``all``; the keys are those of `psm experiment run`, nested ones as dictionaries."""
    from psm.experiments.plan import read_request
    from psm.experiments.suite import run_experiments

    return run_experiments(read_request(names, config or {}, keys))
