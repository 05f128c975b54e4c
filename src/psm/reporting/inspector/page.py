"""Facts and images as one file that a browser opens without any other."""

import base64
import json
from typing import Any

import numpy as np
import torch
from markupsafe import Markup
from torch import Tensor

from psm.config.schema import PretrainConfig
from psm.data import ImageDataset
from psm.evaluation.mining_analysis import soft_parts
from psm.methods.build import method_title
from psm.reporting.inspector.facts import BINS, Facts, Scores, means, worst_negatives, worst_positives
from psm.reporting.inspector.sprites import pack
from psm.reporting.templates import template_environment
from psm.utils.errors import UserError

MOST = 20_000_000  # bytes of a page
SCALE = 10_000  # similarities, weights and shares are stored as whole numbers of this part
NOTHING = -32_768  # a share where there is nothing to say


def render(facts: Facts, data: ImageDataset, config: PretrainConfig, folder: str) -> str:
    """The page. What users named stands in its data alone and reaches the document as text, never as markup."""
    environment = template_environment()

    def part(name: str) -> Markup:
        return Markup(environment.loader.get_source(environment, name)[0])

    shown = shown_images(facts)
    content = described(facts, shown, data, config, folder)
    frame = environment.get_template("inspect.html")
    parts = {"style": part("inspect.css"), "script": part("inspect.js")}
    bare = len(frame.render(**parts, data=embedded(content)).encode())
    room = MOST - bare - 1_000  # for what describes the sheets
    sprites = pack(data.train, shown, room)
    if sprites.characters > room:
        needed = (bare + sprites.characters) / 1e6
        raise UserError(
            f"queries={len(facts.queries)} over {len(facts.epochs)} epochs would make a page of {needed:.0f} MB, more "
            f"than {MOST / 1e6:.0f}: give fewer queries= or negatives=."
        )
    return frame.render(**parts, data=embedded(content | {"sprites": sprites._asdict()}))


def embedded(content: dict[str, Any]) -> Markup:
    """JSON that may stand inside a script element: no text in it can end the element."""
    return Markup(json.dumps(content, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c"))


def shown_images(facts: Facts) -> Tensor:
    """Ids of all images on the page, sorted; their places here are what the page calls them by."""
    ids = [facts.queries, *(x.flatten() for epoch in facts.moments for x in (epoch.positives, epoch.negatives))]
    ids = torch.cat(ids).unique()
    return ids[ids >= 0]


def described(facts: Facts, shown: Tensor, data: ImageDataset, config: PretrainConfig, folder: str) -> dict[str, Any]:
    """Everything the page needs but its images. Arrays run over epochs, then queries."""
    labeled = facts.labels is not None

    def places(ids: Tensor) -> Tensor:
        """From ids to places among the images shown; -1 stays."""
        return torch.where(ids >= 0, torch.searchsorted(shown, ids.clamp(min=0).contiguous()), -1)

    def stacked(name: str) -> Tensor:
        return torch.stack([getattr(epoch, name) for epoch in facts.moments])

    def heights(name: str) -> Tensor:
        """Counts on a scale of 0 to 255, the fullest bin of all negatives of a query being 255."""
        most = stacked("spread").amax(2, keepdim=True).clamp(min=1)
        return (stacked(name) * 255 / most).ceil()

    scored = [epoch.scores for epoch in facts.moments]
    by_name = dict(zip(Scores._fields, zip(*scored, strict=True), strict=True))
    return {
        "about": about(facts, config, folder),
        "epochs": [round(epoch, 2) for epoch in facts.epochs],
        "classes": list(data.classes) if labeled else [],
        "images": packed(shown, "int32"),
        "labels": packed(facts.labels[shown], "int32") if labeled else None,
        "queries": packed(places(facts.queries), "int32"),
        "positives": packed(places(stacked("positives")), "int32"),
        "positive_similarity": packed(scaled(stacked("positive_similarity")), "int16"),
        "weights": packed(scaled(stacked("weights")), "int16"),
        "reference": packed(scaled(stacked("reference")), "int16"),
        "negatives": packed(places(stacked("negatives")), "int32" if len(shown) > 32_767 else "int16"),
        "negative_similarity": packed(scaled(stacked("negative_similarity")), "int16"),
        "count": packed(stacked("count"), "int32"),
        "spread": packed(heights("spread"), "uint8"),
        "spread_false": packed(heights("spread_false"), "uint8") if labeled else None,
        "scores": {name: packed(scaled(torch.stack(x)), "int16") for name, x in by_name.items()},
        "means": [means(s) for s in scored],
        "worst": {
            "positives": packed(torch.stack([worst_positives(s) for s in scored]), "int32"),
            "negatives": packed(torch.stack([worst_negatives(s) for s in scored]), "int32"),
        },
    }


def about(facts: Facts, config: PretrainConfig, folder: str) -> dict[str, Any]:
    """What run and method the page is of, and how its arrays are to be read."""
    method = facts.method
    rule, source = soft_parts(method)
    sampler = method.sampler.settings() if not method.sampler.keeps_all else {}
    return {
        "run": folder,
        "method": config.method,
        "title": method_title(config.method),
        "data": config.data,
        "encoder": config.encoder,
        "epochs": config.epochs,
        "labeled": facts.labels is not None,
        "mines": method.num_mined > 0,
        "rule": rule.part_name,
        "weighting": getattr(rule, "weights", ""),
        "source": source.part_name,
        "bank": method.needs_bank,
        "synthetic": getattr(source, "num_mix", 0) + getattr(source, "num_mix_query", 0),
        "pnsm": method.sampler.part_name == "pnsm",
        "a": sampler.get("a", 0.0),
        "k": facts.moments[0].positives.shape[1],
        "scale": SCALE,
        "bins": BINS,
    }


def scaled(values: Tensor) -> Tensor:
    """Numbers from -1 to 1 as whole numbers; what is not a number as NOTHING."""
    return (values * SCALE).round().nan_to_num(NOTHING)


def packed(values: Tensor, kind: str) -> dict[str, Any]:
    """An array as little-endian bytes in base64: half the size of digits, and read at once."""
    array = values.numpy().astype(np.dtype(kind).newbyteorder("<"))
    return {"kind": kind, "shape": list(array.shape), "bytes": base64.b64encode(array.tobytes()).decode()}
