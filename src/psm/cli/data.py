"""`psm data`: parse, call, print."""

from collections.abc import Sequence

from psm.config import merge as settings
from psm.config.schema import DataConfig as Config
from psm.utils.errors import UserError


def run(arguments: Sequence[str]) -> None:
    config = settings.build(Config, *settings.parse(arguments, Config))
    from psm.reporting.terminal import data_table, published_table, shards_table

    if config.shards and not config.data:
        raise UserError("shards= writes the images of a data set: give data= too.")
    if config.shards and config.sheet:
        raise UserError("shards= writes files and sheet= shows images: give one of them.")
    if config.shards:
        shards_table(config)
        return
    if config.sheet and not config.data:
        raise UserError("sheet= shows images of a data set: give data= too.")
    data_table(config) if config.data else published_table()
