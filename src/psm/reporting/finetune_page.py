"""The page of a run of `psm finetune`: scores, curves, calibration, classes and mistakes in one HTML file."""

import json
import logging
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure

from psm.config import merge as settings
from psm.config.finetune import ResolvedFinetuneConfig
from psm.config.stored import load_finetune_config
from psm.data import ImageDataset, ImageStore, load_dataset
from psm.data.location import data_name
from psm.finetuning.module import SCRATCH
from psm.finetuning.resolve import split_validation
from psm.reporting.curves import FINETUNE_PANELS, draw_curves
from psm.reporting.style import BLUE, GRAY, ORANGE
from psm.reporting.templates import template_environment
from psm.reporting.themed_svg import page_colors, svg_element
from psm.reporting.thumbnails import png_url
from psm.utils.errors import UserError
from psm.utils.files import read_lines, write_text_atomically
from psm.utils.run_folder import RunFolder

log = logging.getLogger("psm")
MOST_CLASSES = 50  # rows of the table of classes


def write_page(folder: Path | str, data: ImageDataset | None = None) -> Path:
    """Write report.html of a run folder, replacing an earlier one. ``data`` avoids loading the images again."""
    run = RunFolder(Path(folder))
    config = load_finetune_config(run)
    scores = json.loads(run.finetuned.read_text()) if run.finetuned.exists() else None
    which = "test" if scores and scores["best"]["test"] else "validation"
    part = scores["best"][which] if scores else None
    classes = _classes(scores["classes"], part["per_class"]) if scores and part else []
    page = (
        template_environment()
        .get_template("finetune.html")
        .render(
            title=_title(config),
            config=config,
            data=data_name(config.data),
            folder=run.folder.name,
            settings=settings.to_yaml(config),
            scores=scores,
            curves=draw_curves(read_lines(run.metrics), FINETUNE_PANELS),
            which=which,
            part=part,
            reliability=_reliability(part["bins"]) if part else "",
            classes=classes,
            shown_classes=len(classes),
            hidden_classes=len(scores["classes"]) - len(classes) if scores else 0,
            mistakes=_mistakes(part["mistakes"], which, config, data) if part else [],
        )
    )
    write_text_atomically(run.page, page)
    return run.page


def _title(config: ResolvedFinetuneConfig) -> str:
    if config.checkpoint == SCRATCH:
        return "A classifier from scratch"
    source = Path(config.checkpoint).name
    return f"A linear head on {source}" if config.head_only else f"{source}, fine-tuned"


def _classes(names: list[str], per_class: list[list[int]]) -> list[tuple[str, int, int]]:
    """Name, right and all images of each class; of many classes those with the lowest accuracy."""
    rows = [(name, right, count) for name, (right, count) in zip(names, per_class, strict=True)]
    if len(rows) <= MOST_CLASSES:
        return rows
    return sorted(rows, key=lambda row: row[1] / max(1, row[2]))[:MOST_CLASSES]


def _reliability(bins: list[dict[str, Any]]) -> str:
    """Accuracy by confidence, and how many images have which confidence."""
    filled = [b for b in bins if b["images"]]
    total = sum(b["images"] for b in filled)
    with page_colors("reliability"):
        figure = Figure(figsize=(5.4, 3.4), layout="constrained")
        axis = figure.subplots()
        axis.plot([0, 100], [0, 100], "--", color=GRAY, linewidth=1, label="confidence = accuracy")
        centers = [100 * (place + 0.5) / len(bins) for place in range(len(bins))]
        shares = [100 * b["images"] / total for b in bins]
        axis.bar(centers, shares, width=92 / len(bins), color=BLUE, alpha=0.35, label="share of the images, %")
        axis.plot(
            [100 * b["confidence"] for b in filled],
            [100 * b["accuracy"] for b in filled],
            "o-",
            color=ORANGE,
            markersize=4,
            label="accuracy, %",
        )
        axis.set(xlim=(0, 100), ylim=(0, 100), xlabel="probability of the predicted class, %")
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.2)
        axis.legend(frameon=False, fontsize=9, loc="upper left")
        return svg_element(figure, "Accuracy by the probability of the predicted class")


def _mistakes(
    mistakes: list[dict[str, Any]], which: str, config: ResolvedFinetuneConfig, data: ImageDataset | None
) -> list[dict[str, Any]]:
    """The mistakes with their images; none where the images cannot be loaded."""
    if not mistakes:
        return []
    try:
        data = data or load_dataset(config.data, config.images, progress=False)
    except UserError as error:  # the page is useful without images
        log.warning("the page has no images: %s", error)
        return []
    images: ImageStore | None = data.test
    if which == "validation":
        images = split_validation(data.train, config.validation).validation if data.labeled else None
    if images is None or max(mistake["image"] for mistake in mistakes) >= len(images):
        return []
    pixels = images.take(torch.tensor([mistake["image"] for mistake in mistakes]))
    return [
        {**mistake, "url": png_url(image), "name": images.name(mistake["image"])}
        for mistake, image in zip(mistakes, pixels, strict=True)
    ]
