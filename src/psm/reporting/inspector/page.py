"""The inspector's page: data, images, style and script in one HTML file."""

import base64
import json
from typing import Any

import numpy as np
import torch
from jinja2 import Environment
from markupsafe import Markup
from torch import Tensor

from psm.config.schema import PretrainConfig
from psm.data import ImageDataset
from psm.evaluation.mining_analysis import source_of
from psm.methods.registry import METHODS, Composition
from psm.reporting.inspector.collect import (
    BINS,
    InspectionData,
    QueryMetrics,
    metric_means,
    worst_negatives,
    worst_positives,
)
from psm.reporting.inspector.sprites import pack
from psm.reporting.templates import template_environment, template_source
from psm.utils.errors import UserError

MAX_PAGE_BYTES = 20_000_000
SCALE = 10_000  # similarities, weights and shares are stored as integers of this unit
MISSING = -32_768  # stands for NaN


def render(collected: InspectionData, data: ImageDataset, config: PretrainConfig, folder: str) -> str:
    """The page. Names given by users are embedded as JSON only and reach the document as text, never as markup."""
    environment = template_environment()
    shown = shown_images(collected)
    content = page_data(collected, shown, data, config, folder)
    without_images = _fill(environment, content)
    left = MAX_PAGE_BYTES - len(without_images.encode()) - 1_000  # for the JSON around the sheets
    sprites = pack(data.train, shown, left)
    if sprites.characters > left:
        needed = (MAX_PAGE_BYTES - left + sprites.characters) / 1e6
        raise UserError(
            f"queries={len(collected.queries)} over {len(collected.epochs)} epochs would make a page of {needed:.0f} "
            f"MB, more than {MAX_PAGE_BYTES / 1e6:.0f}: give fewer queries= or negatives=."
        )
    return _fill(environment, content | {"sprites": sprites._asdict()})


def _fill(environment: Environment, content: dict[str, Any]) -> str:
    style, script = (Markup(template_source(environment, name)) for name in ("inspect.css", "inspect.js"))
    return environment.get_template("inspect.html").render(style=style, script=script, data=embedded_json(content))


def embedded_json(content: dict[str, Any]) -> Markup:
    """JSON that is safe inside a script element: no text in it can end the element."""
    return Markup(json.dumps(content, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c"))


def shown_images(collected: InspectionData) -> Tensor:
    """Sorted ids of all images on the page; the page refers to images by their position here."""
    mined = [x.flatten() for snapshot in collected.snapshots for x in (snapshot.positives, snapshot.negatives)]
    ids = torch.cat([collected.queries, *mined]).unique()
    return ids[ids >= 0]


def page_data(
    collected: InspectionData, shown: Tensor, data: ImageDataset, config: PretrainConfig, folder: str
) -> dict[str, Any]:
    """Everything that the page needs except its images. The dimensions of arrays are epochs, queries, ..."""

    def positions(ids: Tensor) -> Tensor:
        """Positions of ids among the images shown; -1 stays."""
        return torch.where(ids >= 0, torch.searchsorted(shown, ids.clamp(min=0).contiguous()), -1)

    def stacked(name: str) -> Tensor:
        return torch.stack([getattr(snapshot, name) for snapshot in collected.snapshots])

    def fixed_point(name: str) -> dict[str, Any]:
        return pack_array(to_fixed_point(stacked(name)), "int16")

    labels = collected.labels
    metrics = [snapshot.metrics for snapshot in collected.snapshots]
    by_name = dict(zip(QueryMetrics._fields, zip(*metrics, strict=True), strict=True))
    highest = stacked("histogram").amax(2, keepdim=True).clamp(min=1)
    return {
        "about": about(collected, config, folder),
        "epochs": [round(epoch, 2) for epoch in collected.epochs],
        "classes": [] if labels is None else list(data.classes),
        "images": pack_array(shown, "int32"),
        "labels": None if labels is None else pack_array(labels[shown], "int32"),
        "queries": pack_array(positions(collected.queries), "int32"),
        "positives": pack_array(positions(stacked("positives")), "int32"),
        "positive_similarity": fixed_point("positive_similarity"),
        "weights": fixed_point("weights"),
        "reference": fixed_point("reference"),
        "negatives": pack_array(positions(stacked("negatives")), "int32" if len(shown) > 32_767 else "int16"),
        "negative_similarity": fixed_point("negative_similarity"),
        "num_negatives": pack_array(stacked("num_negatives"), "int32"),
        "histogram": pack_array((stacked("histogram") * 255 / highest).ceil(), "uint8"),
        "histogram_false": (
            None if labels is None else pack_array((stacked("histogram_false") * 255 / highest).ceil(), "uint8")
        ),
        "metrics": {name: pack_array(to_fixed_point(torch.stack(x)), "int16") for name, x in by_name.items()},
        "means": [metric_means(x) for x in metrics],
        "worst": {
            "positives": pack_array(torch.stack([worst_positives(x) for x in metrics]), "int32"),
            "negatives": pack_array(torch.stack([worst_negatives(x) for x in metrics]), "int32"),
        },
    }


def about(collected: InspectionData, config: PretrainConfig, folder: str) -> dict[str, Any]:
    """The run, the texts about its method, and the constants needed to read the arrays."""
    k = collected.snapshots[0].positives.shape[1]
    return {
        "run": folder,
        "title": METHODS[config.method].title,
        "data": config.data,
        "encoder": config.encoder,
        "epochs": config.epochs,
        "labeled": collected.labels is not None,
        "k": k,
        "scale": SCALE,
        "missing": MISSING,
        "bins": BINS,
        **describe_method(collected.composition, config.method, k),
    }


def describe_method(spec: Composition, name: str, k: int) -> dict[str, Any]:
    """All that the page says about a method; its script knows no method.

    Args:
        spec: the parts of the method.
        name: the method's name.
        k: number of positives shown per query.

    Returns:
        method: the name.
        mines: whether the positives shown are mined by the method, and have weights.
        positives_name, positives_short: what the positives shown are called.
        positives_title, positives_text: heading of the positives and the sentences below it.
        negatives_title, negatives_text: the same of the negatives.
        anchor: what the similarity of negatives is measured to.
        competitor: the sample that the negatives compete with, where eq. 8 peaks.
        pnsm: None, or {"a": a} where negatives are kept with the probability of eq. 8.
    """
    source = source_of(spec)
    anchored_at_positive = source == "queries"
    return {
        "method": name,
        "mines": spec.mines,
        "positives_name": "mined positives" if spec.mines else "nearest images",
        "positives_short": "positives" if spec.mines else "neighbors",
        "positives_title": "Which positives were mined for it?" if spec.mines else "What could be mined for it?",
        "positives_text": _positives_text(spec, name, k),
        "negatives_title": (
            "Which negatives does PNSM keep?" if spec.negatives.pnsm else "Which negatives is it pushed from?"
        ),
        "negatives_text": _negatives_text(spec, name, source),
        "anchor": "mined positive" if anchored_at_positive else "query",
        "competitor": "query" if anchored_at_positive else _COMPETITORS.get(str(spec.positives.rule), "key"),
        "pnsm": {"a": spec.negatives.a} if spec.negatives.pnsm else None,
    }


_COMPETITORS = {"nearest": "mined positive"}
_NEGATIVES = {
    "positives": "keys of other images and the positives mined for those",
    "views": "keys of other images",
    "bank": "rows of the bank",
    "queries": "predictions for other images; the mined positive is the anchor they are compared with",
}


def _positives_text(spec: Composition, name: str, k: int) -> str:
    similarity = "s: similarity to the query."
    if not spec.mines:
        candidates = "bank rows" if spec.needs_bank else "of the other images looked at, those"
        return (
            f"{name} mines no positives. Not used by it, but there to be mined: the {k} {candidates} most similar to "
            f"its key. {similarity}"
        )
    variant = "" if spec.positives.weighting == "V0" else f", {spec.positives.weighting}"
    texts = {
        "nearest": f"The bank row most similar to its key (eq. 3), which replaces the key. {similarity}",
        "neighbors": f"The {k} bank rows most similar to its key (eq. 3). w: weight (eq. 5{variant}), beside the key's "
        f"own weight of 1; {similarity}",
    }
    return texts[str(spec.positives.rule)]


def _negatives_text(spec: Composition, name: str, source: str) -> str:
    if source not in _NEGATIVES or spec.loss.objective != "contrastive":
        return f"None: {name} has no negatives."
    kept = (
        f"Each is kept with probability p = exp(−a (s − s(q, key))²), a = {spec.negatives.a:g} (eq. 8): the curve."
        if spec.negatives.pnsm
        else "Without PNSM all of them are kept."
    )
    synthetic = (spec.negatives.mixed or 0) + (spec.negatives.mixed_query or 0)
    omitted = (
        f" The {synthetic} synthetic ones mixed from the hardest have no image and are left out." if synthetic else ""
    )
    return f"Its negatives are {_NEGATIVES[source]}. {kept}{omitted if synthetic else ''}"


def to_fixed_point(values: Tensor) -> Tensor:
    """Numbers from -1 to 1 as integers of 1 / SCALE; NaN as MISSING."""
    return (values * SCALE).round().nan_to_num(MISSING)


def pack_array(values: Tensor, kind: str) -> dict[str, Any]:
    """An array as little-endian bytes in base64."""
    array = values.numpy().astype(np.dtype(kind).newbyteorder("<"))
    return {"kind": kind, "shape": list(array.shape), "bytes": base64.b64encode(array.tobytes()).decode()}
