"""`psm worth`: parse, call, print."""

from collections.abc import Sequence

from psm.cli.arguments import with_positional
from psm.config import merge as settings
from psm.config.worth import WorthConfig as Config


def run(arguments: Sequence[str]) -> None:
    overrides = settings.parse(with_positional(arguments, "checkpoint"), Config)
    settings.build(Config, *overrides)
    from psm.finetuning.worth.run import run_worth
    from psm.ops import keep_freed_memory
    from psm.reporting.worth_page import write_page
    from psm.reporting.worth_terminal import worth_table

    keep_freed_memory()
    result = run_worth(*overrides)
    page = write_page(result)
    worth_table(result.worth)
    print(result.worth.sentence)
    print(f"page:    {page}")
    print(f"results: {result.folder / 'results.csv'}")
