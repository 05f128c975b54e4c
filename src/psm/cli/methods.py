"""`psm methods`: parse, call, print."""

from collections.abc import Sequence

from psm.config import merge as settings
from psm.config.schema import MethodsConfig as Config


def run(arguments: Sequence[str]) -> None:
    config = settings.build(Config, *settings.parse(arguments, Config))
    from psm.methods.plugins import load_plugins
    from psm.reporting.terminal import method_table, methods_table

    load_plugins(config.plugins)
    method_table(config.method) if config.method else methods_table()
