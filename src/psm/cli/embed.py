"""`psm embed`: parse, call, print."""

from collections.abc import Sequence

from psm.cli.arguments import with_positional
from psm.config import merge as settings
from psm.config.embed import EmbedConfig as Config

SHOWN = 10  # unreadable images that are printed


def run(arguments: Sequence[str]) -> None:
    overrides = settings.parse(with_positional(arguments, "checkpoint"), Config)
    settings.build(Config, *overrides)
    from psm.embedding.embed import UNREADABLE, run_embedding
    from psm.ops import keep_freed_memory

    keep_freed_memory()
    result = run_embedding(*overrides)
    for path, reason in result.unreadable[:SHOWN]:
        print(f"unreadable: {path}: {reason}")
    if result.unreadable:
        print(f"left out:   {_counted(len(result.unreadable), 'image')}, listed in {result.file}{UNREADABLE}")
    size = result.file.stat().st_size / 1e6
    print(f"features:   {result.file} ({_counted(result.rows, 'row')} of {result.width} numbers, {size:.1f} MB)")
    print(f"search:     psm search {result.file} query=PHOTO")


def _counted(count: int, what: str) -> str:
    return f"{count:,} {what}{'s' if count != 1 else ''}"
