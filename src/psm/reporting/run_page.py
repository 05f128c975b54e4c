"""A run as one page that can be opened anywhere: curves, scores, and what was mined."""

import base64
import io
import logging
from pathlib import Path

import torch

from psm.config import merge as settings
from psm.config.stored import load_run_config
from psm.data import ImageDataset, load_dataset
from psm.evaluation.mining_analysis import MinedQuery, mined_samples
from psm.methods.build import method_title
from psm.reporting.curves import curves
from psm.reporting.templates import template_environment
from psm.utils.errors import UserError
from psm.utils.files import read_lines, write_text_atomically
from psm.utils.indices import evenly_spaced
from psm.utils.run_folder import RunFolder

log = logging.getLogger("psm")
QUERIES = 8


def write_page(folder: Path | str, data: ImageDataset | None = None) -> Path:
    """Write (or renew) report.html of a run folder. ``data`` saves loading the images again."""
    run = RunFolder(Path(folder))
    config = load_run_config(run)
    metrics, scores = read_lines(run.metrics), read_lines(run.scores)
    images: dict[int, str] = {}
    queries: list[MinedQuery] = []
    try:
        data = data or load_dataset(config.data, config.images, progress=False)
        if run.checkpoint.exists() and config.encoder != "custom":
            chosen = evenly_spaced(len(data.train), QUERIES)
            found = mined_samples(run.checkpoint, data, chosen)
            queries = [query for query in found if query.positives or query.negatives]
            images = _images(data, queries) if queries else {}
    except UserError as error:  # the page is worth having without images
        log.warning("the page has no images: %s", error)
    page = (
        template_environment()
        .get_template("run.html")
        .render(
            title=method_title(config.method),
            config=config,
            folder=run.folder.name,
            settings=settings.to_yaml(config),
            curves=curves(metrics),
            last=metrics[-1] if metrics else {},
            scores=_newest(scores),
            queries=queries,
            images=images,
            classes=data.classes if data else (),
            labels=data.train.labels if data else None,
        )
    )
    write_text_atomically(run.page, page)
    return run.page


def _newest(scores: list[dict]) -> list[dict]:
    """The newest score of each thing, as rows with both scores."""
    rows: dict[str, dict] = {}
    for score in scores:
        rows.setdefault(score["of"], {"of": score["of"]})[score["score"]] = score
    return list(rows.values())


def _images(data: ImageDataset, queries: list[MinedQuery]) -> dict[int, str]:
    """Every image on the page, once, as a data URL."""
    from PIL import Image

    wanted = sorted({q.image for q in queries} | {s.image for q in queries for s in (*q.positives, *q.negatives)})
    urls = {}
    for index, pixels in zip(wanted, data.train.take(torch.tensor(wanted)), strict=True):
        stream = io.BytesIO()
        Image.fromarray(pixels.permute(1, 2, 0).numpy()).save(stream, "PNG", optimize=True)
        urls[index] = "data:image/png;base64," + base64.b64encode(stream.getvalue()).decode()
    return urls
