"""The page of a search: every query with the images that were found for it."""

import base64
import io
import logging
from contextlib import ExitStack
from pathlib import Path

import numpy as np
from PIL import Image

from psm.config.search import SearchConfig
from psm.data.any_image import square_pixels
from psm.embedding.images import table_images
from psm.embedding.search import Search
from psm.reporting.templates import joined_sources, template_environment
from psm.utils.errors import UserError
from psm.utils.files import output_file, write_text_atomically

log = logging.getLogger("psm")

SIDES = (160, 112, 80, 56)  # of a thumbnail in pixels; the largest that keeps the page small is used
MAX_IMAGE_CHARACTERS = 16_000_000
QUALITY = 85


def page_path(config: SearchConfig) -> Path | None:
    """The page to write, None where none is wanted; refused before the search if it cannot be written."""
    if not config.page:
        return None
    features = Path(config.features).expanduser()
    return output_file(config.out, features.with_name(f"{features.name}.search.html"), config.overwrite)


def write_search_page(search: Search, page: Path, data: str | list[str] | None = None) -> Path:
    """Write the page of a search.

    Args:
        search: what was found.
        page: file to write, replaced if it is there.
        data: where the images are now; None: where they were.
    """
    queries, found = _pixels(search, data)
    for side in SIDES:
        urls = {row: _data_url(pixels, side) for row, pixels in found.items()}
        query_urls = [None if pixels is None else _data_url(pixels, 2 * side) for pixels in queries]
        if sum(len(url) for url in (*urls.values(), *query_urls) if url) < MAX_IMAGE_CHARACTERS:
            break
    environment = template_environment()
    content = environment.get_template("search.html").render(
        style=joined_sources(environment, "look.css"),
        features=search.index.file.name,
        count=len(search.index),
        encoder=search.index.table.about["encoder"],
        seconds=search.seconds,
        results=list(zip(search.results, query_urls, strict=True)),
        urls=urls,
        side=side,
    )
    write_text_atomically(page, content)
    return page


def _pixels(search: Search, data: str | list[str] | None) -> tuple[list[np.ndarray | None], dict[int, np.ndarray]]:
    """The images of the queries, None where they cannot be read, and those of the rows."""
    rows = sorted(
        {match.row for result in search.results for match in result.matches}
        | {result.row for result in search.results if result.row is not None}
    )
    found: dict[int, np.ndarray] = {}
    with ExitStack() as stack:
        try:
            found = stack.enter_context(table_images(search.index.table, data))(rows, 2 * SIDES[0])
        except UserError as error:  # the page is useful without images
            log.warning("the page has no images: %s", error)
    queries = [
        square_pixels(result.file, 2 * SIDES[0]) if result.file is not None else found.get(result.row or 0)
        for result in search.results
    ]
    return queries, found


def _data_url(pixels: np.ndarray, side: int) -> str:
    image = Image.fromarray(np.ascontiguousarray(pixels.transpose(1, 2, 0)))
    if image.width > side:
        image = image.resize((side, side), Image.Resampling.LANCZOS)
    stream = io.BytesIO()
    image.save(stream, "JPEG", quality=QUALITY)
    return "data:image/jpeg;base64," + base64.b64encode(stream.getvalue()).decode()
