"""`psm inspect`: parse, call, print."""

from collections.abc import Sequence

from psm.cli.arguments import with_positional
from psm.config import merge as settings
from psm.config.schema import InspectConfig as Config


def run(arguments: Sequence[str]) -> None:
    overrides = settings.parse(with_positional(arguments, "run"), Config)
    settings.build(Config, *overrides)
    from psm.reporting.inspector import run_inspection

    inspection = run_inspection(*overrides)
    print(f"page: {inspection.page} ({inspection.page.stat().st_size / 1e6:.1f} MB)")
    for sentence in inspection.remarks:
        print(sentence)
