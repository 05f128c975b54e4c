"""`psm predict`: parse, call, print."""

from collections.abc import Sequence

from psm.cli.arguments import with_positional
from psm.config import merge as settings
from psm.config.predict import PredictConfig as Config


def run(arguments: Sequence[str]) -> None:
    overrides = settings.parse(with_positional(arguments, "checkpoint"), Config)
    settings.build(Config, *overrides)
    from psm.finetuning.predict import run_prediction
    from psm.ops import keep_freed_memory
    from psm.reporting.finetune_terminal import prediction_lines

    keep_freed_memory()
    for line in prediction_lines(run_prediction(*overrides)):
        print(line)
