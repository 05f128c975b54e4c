"""`psm data`: parse, call, print."""

from collections.abc import Sequence

from psm.config import merge as settings
from psm.config.schema import DataConfig as Config
from psm.utils.errors import UserError


def run(arguments: Sequence[str]) -> None:
    config = settings.build(Config, *settings.parse(arguments, Config))
    from psm.reporting.terminal import data_table, published_table

    if config.sheet and not config.data:
        raise UserError("sheet= shows images of a data set: give data= too.")
    data_table(config) if config.data else published_table()
