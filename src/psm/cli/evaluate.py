"""`psm evaluate`: parse, call, print."""

from collections.abc import Sequence

from psm.cli.arguments import with_positional
from psm.config import merge as settings
from psm.config.schema import EvaluateConfig as Config


def run(arguments: Sequence[str]) -> None:
    overrides = settings.parse(with_positional(arguments, "checkpoint"), Config)
    settings.build(Config, *overrides)
    from psm.evaluation.evaluate import run_evaluation
    from psm.reporting.run_page import write_page
    from psm.reporting.score_table import scores_table

    evaluation = run_evaluation(*overrides)
    scores_table(evaluation.scores)
    if evaluation.run is not None:
        print(f"page: {write_page(evaluation.run, evaluation.training_data)}")
