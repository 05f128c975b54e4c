"""The page of a run: curves, scores and mined samples in one HTML file."""

import logging
from pathlib import Path, PurePosixPath
from typing import Any

import torch

from psm.config import merge as settings
from psm.config.stored import is_finetuning, load_run_config
from psm.data import ImageDataset, load_dataset
from psm.data.location import data_name
from psm.evaluation.mining_analysis import MinedQuery, mined_samples
from psm.evaluation.scores import TITLES, Score
from psm.methods.build import method_title
from psm.reporting.curves import draw_curves
from psm.reporting.finetune_page import write_page as write_finetune_page
from psm.reporting.score_table import score_rows
from psm.reporting.templates import template_environment
from psm.reporting.thumbnails import png_url
from psm.utils.errors import UserError
from psm.utils.files import read_lines, write_text_atomically
from psm.utils.run_folder import RunFolder

log = logging.getLogger("psm")
QUERIES = 8


def write_page(folder: Path | str, data: ImageDataset | None = None) -> Path:
    """Write report.html of a run folder, replacing an earlier one. ``data`` avoids loading the images again."""
    run = RunFolder(Path(folder))
    if is_finetuning(run):
        return write_finetune_page(folder, data)
    config = load_run_config(run)
    names: dict[int, str] = {}
    metrics, scores = read_lines(run.metrics), _newest_scores(read_lines(run.scores))
    accuracies, measures = score_rows(scores)
    queries: list[MinedQuery] = []
    try:
        data = data or load_dataset(config.data, config.images, progress=False)
        if run.checkpoint.exists() and config.encoder != "custom":
            queries = _mined_queries(run.checkpoint, data)
            names = {index: data.train.name(index) for index in _shown(queries)}
    except UserError as error:  # the page is useful without images
        log.warning("the page has no images: %s", error)
    page = (
        template_environment()
        .get_template("run.html")
        .render(
            title=method_title(config.method),
            config=config,
            data=data_name(config.data),
            folder=run.folder.name,
            settings=settings.to_yaml(config),
            curves=draw_curves(metrics),
            last=metrics[-1] if metrics else {},
            scores=scores,
            accuracies=accuracies,
            measures=measures,
            queries=queries,
            images=_image_urls(data, queries) if data and queries else {},
            names=names,
            short_names={index: _short(name) for index, name in names.items()},
            classes=data.classes if data else (),
            labels=data.train.labels if data else None,
        )
    )
    write_text_atomically(run.page, page)
    return run.page


def _mined_queries(checkpoint: Path, data: ImageDataset) -> list[MinedQuery]:
    """Samples mined for some evenly spaced training images; empty for a method without positives and negatives."""
    chosen = data.train.sample(QUERIES)
    found = mined_samples(checkpoint, data, chosen)
    return [query for query in found if query.positives or query.negatives]


def _newest_scores(lines: list[dict[str, Any]]) -> list[Score]:
    """The newest score of each kind, protocol and encoder or baseline; those of a kind and encoder together."""
    newest: dict[tuple[str, str, str], Score] = {}
    for line in lines:
        if line.get("score") not in TITLES or "of" not in line:
            continue  # of another version
        score = Score.from_record(line)
        newest[score.of, score.score, score.describe()] = score
    subjects = list(dict.fromkeys(score.of for score in newest.values()))
    kinds = list(TITLES)
    return sorted(newest.values(), key=lambda score: (subjects.index(score.of), kinds.index(score.score)))


def _short(name: str) -> str:
    """What fits below a small image: names of files differ at their ends."""
    stem = PurePosixPath(name).stem
    return f"…{stem[-5:]}" if len(stem) > 6 else stem


def _shown(queries: list[MinedQuery]) -> list[int]:
    """Ids of all images on the page."""
    samples = [sample for query in queries for sample in (*query.positives, *query.negatives)]
    return sorted({query.image for query in queries} | {sample.image for sample in samples})


def _image_urls(data: ImageDataset, queries: list[MinedQuery]) -> dict[int, str]:
    """Data URLs of all images on the page, by image id."""
    ids = _shown(queries)
    return {i: png_url(pixels) for i, pixels in zip(ids, data.train.take(torch.tensor(ids)), strict=True)}
