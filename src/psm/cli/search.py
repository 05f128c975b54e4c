"""`psm search`: parse, call, print."""

from collections.abc import Sequence

from psm.cli.arguments import with_positional
from psm.config import merge as settings
from psm.config.search import SearchConfig as Config


def run(arguments: Sequence[str]) -> None:
    overrides = settings.parse(with_positional(arguments, "features"), Config)
    config = settings.build(Config, *overrides)
    from psm.embedding.search import check_settings, run_search
    from psm.reporting.search_page import page_path, write_search_page
    from psm.reporting.terminal import search_tables

    check_settings(config)
    page = page_path(config)
    search = run_search(*overrides)
    search_tables(search.results)
    print(f"searched: {len(search.index):,} images in {search.seconds:.3f} s")
    if page is not None:
        print(f"page:     {write_search_page(search, page, config.data)}")
