"""`psm export`: parse, call, print."""

from collections.abc import Sequence

from psm.cli.arguments import with_positional
from psm.config import merge as settings
from psm.config.export import ExportConfig as Config


def run(arguments: Sequence[str]) -> None:
    overrides = settings.parse(with_positional(arguments, "checkpoint"), Config)
    settings.build(Config, *overrides)
    from psm.exporting.export import run_export

    result = run_export(*overrides)
    print(f"exported: {result.path} ({result.megabytes:.1f} MB)")
    print(f"checked:  {result.verdict}")
    print("use:")
    for line in result.usage:
        print(f"    {line}")
