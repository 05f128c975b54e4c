"""All directions and terms of a batch at once, as on an accelerator, give the loss and gradient of one by one."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch

import psm.losses.chunked
import psm.mining.pnsm
from helpers import as_on_an_accelerator, batch_loss, filled, random_vectors
from psm.losses.contrastive import ContrastiveLoss
from psm.methods import METHODS, get_method
from psm.mining.positives import NeighborPositives
from psm.models.outputs import Embeddings

SOME = {"sampler": "none"}  # what is drawn depends on the order; a sampler that draws nothing is tested by itself
SPECS = [
    *({"name": name} for name in METHODS if name not in ("psm", "psmv2", "mochi")),
    *({"name": "psm", **SOME, "positives": x} for x in ({}, {"agree": True}, {"weights": "V1"}, "nn", "view")),
    *({"name": "psm", **SOME, "negatives": x} for x in ("views", "bank")),
    *({"name": "psm", **SOME, "loss": x} for x in ({"hard_weight": 0.3}, {"symmetric": False}, {"weight_sum": 1.0})),
    *(
        {"name": "psm", **SOME, "bank": {"keys": "mean"}, "positives": {"k": 3, "share": x}, "loss": {"weight_sum": y}}
        for x, y in ((1.0, 0.0), (0.3, 0.0), (0.3, 3.0))
    ),
    *(
        {"name": "psm", **SOME, "positives": {"k": 3, "weights": w, **more}, "loss": {"weight_sum": 3.0}}
        for w in ("V0", "V1", "V2", "V4")
        for more in ({}, {"share": 0.3})
    ),
    {"name": "psmv2", **SOME},
    {"name": "mochi", "negatives": {"num_mix": 0, "num_mix_query": 0}},
]


def computed(spec: Any, views: int = 2, rows: int = 40) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """The loss with its gradients, and its metrics."""
    z, q, k, bank = random_vectors(0, (views, 6, 4), (views, 6, 4), (views, 6, 4), (rows, 4))
    z.requires_grad_()
    query = q.requires_grad_() if spec.predictor.enabled else z
    key = k if spec.target.enabled else z
    loss, metrics = batch_loss(Embeddings(z, query, key), spec, filled(bank, size=60), torch.arange(6))
    gradients = torch.autograd.grad(loss, [z, query], allow_unused=True)
    return [loss, *(x for x in gradients if x is not None)], metrics


@pytest.mark.parametrize("views", [2, 3])
@pytest.mark.parametrize("given", SPECS, ids=str)
def test_at_once_as_one_by_one(given: dict[str, Any], views: int, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = get_method(**given)
    expected, metrics = computed(spec, views)
    as_on_an_accelerator(monkeypatch)
    found, told = computed(spec, views)
    torch.testing.assert_close(found, expected)
    assert list(told) == list(metrics)
    for name in set(metrics) - {"mined_similarity"}:  # a mean over all directions: of as many rows in each, or not
        torch.testing.assert_close(told[name], metrics[name])


@pytest.mark.parametrize("pairs", [None, 60])
def test_pnsm_keeps_the_same_pairs_at_once_and_in_chunks(pairs: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psm.mining.pnsm, "mine_negatives", lambda similarity, positive, *_: similarity < 0.2)
    expected, metrics = computed(get_method("psm"))
    as_on_an_accelerator(monkeypatch)
    if pairs is not None:
        monkeypatch.setattr(psm.losses.chunked, "PAIRS", pairs)
    found, told = computed(get_method("psm"))
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(told, metrics)
    assert 0 < metrics["negatives_kept"] < 1


def test_a_bank_with_too_few_rows_leaves_the_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = get_method("psm", **SOME)
    expected, metrics = computed(spec, rows=5)
    as_on_an_accelerator(monkeypatch)
    found, told = computed(spec, rows=5)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(told, metrics)
    assert 0 < metrics["mined_share"] < 1, "images in the bank have too few rows of others"


def test_parts_from_elsewhere_see_one_direction_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []

    @dataclass(frozen=True)
    class Watching(NeighborPositives):
        def __call__(self, batch: Any) -> Any:
            sizes.append(len(batch.query))
            return super().__call__(batch)

    as_on_an_accelerator(monkeypatch)
    spec = get_method("psm", positives=Watching())
    assert not ContrastiveLoss(Watching()).joins_directions()
    computed(spec)
    assert sizes == [6, 6]


@pytest.mark.parametrize(
    ("positives", "by_view", "by_mean"),
    [
        ({}, True, True),
        ({"share": 0.3}, False, True),
        ({"min_similarity": 0.1}, False, True),
        ({"agree": True}, False, True),
        ({"k": 0, "weights": "V3"}, True, True),
        ({"weights": "V1"}, False, False),
        ({"weights": "V3"}, False, False),
    ],
)
def test_an_equal_sum_is_joined_where_all_directions_have_it(positives: Any, by_view: bool, by_mean: bool) -> None:
    loss = ContrastiveLoss(NeighborPositives(**positives), weight_sum=3.0)
    assert (loss.joins_directions(one_search=False), loss.joins_directions(one_search=True)) == (by_view, by_mean)
    assert ContrastiveLoss(NeighborPositives(**positives)).joins_directions()
