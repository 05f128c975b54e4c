"""The inspector's page: data, images, style and script in one HTML file."""

from typing import Any

import torch
from jinja2 import Environment
from torch import Tensor

from psm.config.parts import Part
from psm.config.schema import ResolvedPretrainConfig
from psm.data import ImageDataset
from psm.data.location import data_name
from psm.evaluation.mining_analysis import soft_parts
from psm.methods.build import method_title
from psm.methods.spec import MethodSpec
from psm.mining.pnsm import NegativeSampler
from psm.reporting.inspector.collect import (
    BINS,
    InspectionData,
    QueryMetrics,
    metric_means,
    worst_negatives,
    worst_positives,
)
from psm.reporting.page_data import MAX_PAGE_BYTES, MISSING, SCALE, embedded_json, pack_array, to_fixed_point
from psm.reporting.sprites import pack
from psm.reporting.templates import joined_sources, template_environment
from psm.utils.errors import UserError

GRID = 101  # points of the keep curve on each axis


def render(collected: InspectionData, data: ImageDataset, config: ResolvedPretrainConfig, folder: str) -> str:
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
    style, script = joined_sources(environment, "inspect.css"), joined_sources(environment, "common.js", "inspect.js")
    return environment.get_template("inspect.html").render(style=style, script=script, data=embedded_json(content))


def shown_images(collected: InspectionData) -> Tensor:
    """Sorted ids of all images on the page; the page refers to images by their position here."""
    mined = [x.flatten() for snapshot in collected.snapshots for x in (snapshot.positives, snapshot.negatives)]
    ids = torch.cat([collected.queries, *mined]).unique()
    return ids[ids >= 0]


def page_data(
    collected: InspectionData, shown: Tensor, data: ImageDataset, config: ResolvedPretrainConfig, folder: str
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
        "names": None if data.train.names is None else [data.train.name(index) for index in shown.tolist()],
        "labels": None if labels is None else pack_array(labels[shown], "int32"),
        "queries": pack_array(positions(collected.queries), "int32"),
        "positives": pack_array(positions(stacked("positives")), "int32"),
        "positive_similarity": fixed_point("positive_similarity"),
        "weights": fixed_point("weights"),
        "reference": fixed_point("reference"),
        "negatives": pack_array(positions(stacked("negatives")), "int32" if len(shown) > 32_767 else "int16"),
        "negative_similarity": fixed_point("negative_similarity"),
        "negative_keep": fixed_point("negative_keep"),
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


def about(collected: InspectionData, config: ResolvedPretrainConfig, folder: str) -> dict[str, Any]:
    """The run, the texts about its method, and the constants needed to read the arrays."""
    k = collected.snapshots[0].positives.shape[1]
    return {
        "run": folder,
        "title": method_title(config.method),
        "data": data_name(config.data),
        "encoder": config.encoder,
        "epochs": config.epochs,
        "labeled": collected.labels is not None,
        "k": k,
        "scale": SCALE,
        "missing": MISSING,
        "bins": BINS,
        **describe_method(collected.method, config.method, k),
    }


def describe_method(method: MethodSpec, name: str, k: int) -> dict[str, Any]:
    """All that the page says about a method, from its parts; the page's script knows no method.

    Args:
        method: the parts of the method.
        name: its name.
        k: number of positives shown per query.

    Returns:
        method: the name.
        mines: whether the positives shown are mined by the method, and have weights.
        positives_name, positives_short: what the positives shown are called.
        positives_title, positives_text: heading of the positives and the sentences below it.
        negatives_title, negatives_text: the same of the negatives.
        anchor: what the similarity of negatives is measured to.
        competitor: the sample that the negatives compete with.
        sampler: None where all negatives are kept, or the table of ``keep_table``.
    """
    rule, source = soft_parts(method)
    mines, sampler = method.num_mined > 0, method.sampler
    anchored_at_query = source.anchor_name == "query"
    return {
        "method": name,
        "mines": mines,
        "positives_name": "mined positives" if mines else "nearest images",
        "positives_short": "positives" if mines else "neighbors",
        "positives_title": "Which positives were mined for it?" if mines else "What could be mined for it?",
        "positives_text": _positives_text(method, name, k),
        "negatives_title": (
            "Which negatives is it pushed from?"
            if sampler.keeps_all
            else f"Which negatives does {type(sampler).__name__} keep?"
        ),
        "negatives_text": _negatives_text(method, name),
        "anchor": source.anchor_name,
        "competitor": rule.first_name if anchored_at_query else "query",
        "sampler": None if sampler.keeps_all else keep_table(sampler),
    }


_LEGEND = "w: weight; s: similarity to the query."


def _positives_text(method: MethodSpec, name: str, k: int) -> str:
    if method.num_mined:
        return " ".join(filter(None, (_doc(method.positives), method.positives.remark, _LEGEND)))
    candidates = "bank rows" if method.needs_bank else "of the other images looked at, those"
    return (
        f"{name} mines no positives. Not used by it, but there to be mined: the {k} {candidates} most similar to its "
        "key. s: similarity to the query."
    )


def _negatives_text(method: MethodSpec, name: str) -> str:
    _, source = soft_parts(method)
    if not method.objective.uses_negatives:
        return f"None: {name} has no negatives."
    sampler = method.sampler
    kept = "All of them are kept." if sampler.keeps_all else f"{_doc(sampler)} The curve is this probability, p."
    synthetic = " Synthetic negatives have no image and are not shown." if source.has_synthetic else ""
    return f"Its negatives: {source.describe()}. {kept}{synthetic}"


def _doc(part: Part) -> str:
    """The docstring of a part as one line, or its description where it has none."""
    return " ".join((type(part).__doc__ or f"{part.describe()}.").split())


def keep_table(sampler: NegativeSampler) -> dict[str, Any]:
    """Keep probability on a grid of similarities from -1 to 1, (GRID, GRID): rows by that of the positive."""
    grid = torch.linspace(-1, 1, GRID)
    return pack_array(to_fixed_point(sampler.probability(grid.expand(GRID, -1).clone(), grid)), "int16")
