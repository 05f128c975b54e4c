"""`psm explore`: parse, call, print."""

from collections.abc import Sequence

from psm.cli.arguments import with_positional
from psm.config import merge as settings
from psm.config.explore import ExploreConfig as Config


def run(arguments: Sequence[str]) -> None:
    overrides = settings.parse(with_positional(arguments, "checkpoint"), Config)
    settings.build(Config, *overrides)
    from psm.ops import keep_freed_memory
    from psm.reporting.explorer import run_exploration

    keep_freed_memory()
    result = run_exploration(*overrides)
    collection, page = result.collection, result.page
    groups, doubtful = int(collection.duplicates.group.max()) + 1, len(collection.doubtful)
    print(
        f"images:     {len(result.index):,} in {collection.clusters.number} clusters, map by {collection.layout_kind}"
    )
    print(f"duplicates: {int((collection.duplicates.group >= 0).sum()):,} images in {groups:,} groups")
    if collection.votes is not None:
        print(f"labels:     {doubtful:,} disagree with their neighbors'")
    for file in result.files:
        print(f"file:       {file}")
    print(f"page:       {page} ({page.stat().st_size / 1e6:.1f} MB)")
