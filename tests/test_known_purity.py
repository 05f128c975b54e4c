"""study/known_purity.py: rows that are chosen by the labels have the purity that was asked for."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import normalize

import psm
from psm.experiments.catalog import EXPERIMENTS
from psm.methods.plugins import load_plugins
from psm.mining.batch import MiningBatch
from psm.mining.negatives import NEGATIVES, Anchors
from psm.mining.positives import POSITIVES, ViewPositives

PLUGIN = Path(__file__).parents[1] / "study" / "known_purity.py"
IMAGES, WIDTH, CLASSES = 600, 16, 5


@pytest.fixture(scope="module")
def plugin() -> Any:
    (path,) = load_plugins([str(PLUGIN)])
    name = next(name for name, module in list(sys.modules.items()) if getattr(module, "__file__", None) == path)
    yield sys.modules[name]
    del sys.modules[name], EXPERIMENTS["known-purity"]  # other tests list all parts and experiments
    for rule in ("known_purity", "any_known"):
        del POSITIVES._parts[rule]
    del NEGATIVES._parts["true_views"]


@pytest.fixture
def batch(plugin: Any, monkeypatch: pytest.MonkeyPatch) -> MiningBatch:
    draws = torch.Generator().manual_seed(0)
    labels = torch.randint(CLASSES, (IMAGES,), generator=draws)
    monkeypatch.setattr(plugin, "labels", lambda: labels)
    vectors = normalize(torch.randn(IMAGES, WIDTH, generator=draws), dim=1)
    bank = psm.MemoryBank(400, width=WIDTH)
    bank.enqueue(vectors[:400], torch.arange(400))
    query = vectors[400:]
    return MiningBatch(query, query, query, ids=torch.arange(400, IMAGES), bank=bank, generator=draws)


@pytest.mark.parametrize("rule", ["known_purity", "any_known"])
@pytest.mark.parametrize("share", [0.0, 0.75, 1.0])
def test_rows_have_the_purity_asked_for(rule: str, share: float, batch: Any, plugin: Any) -> None:
    found: Any = POSITIVES.build({"rule": rule, "p": share})(batch)
    same = plugin.labels()[found.ids[:, 1]] == plugin.labels()[batch.ids]
    assert float(found.metrics["row_purity"]) == pytest.approx(float(same.float().mean()))
    assert float(same.float().mean()) == pytest.approx(share, abs=0.0 if share in (0, 1) else 0.12)
    assert torch.equal(found.weights, torch.ones(200, 2))
    assert torch.equal(found.vectors[:, 1], batch.bank.rows[found.ids[:, 1]])


def test_the_nearest_of_a_kind_is_taken_or_any(batch: Any, plugin: Any) -> None:
    rows, labels = batch.bank.rows[:400], plugin.labels()
    similarity = (batch.key @ rows.T).masked_fill(labels[:400] != labels[batch.ids][:, None], -2)
    found: list[Any] = [POSITIVES.build({"rule": rule})(batch) for rule in ("known_purity", "any_known")]
    nearest, others = (positives.ids[:, 1] for positives in found)
    assert torch.equal(nearest, similarity.argmax(1))
    assert (others != nearest).float().mean() > 0.9
    assert len(others.unique()) > 100


def test_no_negative_has_the_label_of_its_query(batch: Any, plugin: Any) -> None:
    batch = batch._replace(query_view_key=-batch.key)
    own = plugin.labels()[batch.ids]
    candidates: Any = NEGATIVES.build("true_views")(batch, ViewPositives()(batch))
    rows = slice(30, 80)
    query = batch.query[rows]
    found = candidates.logits(Anchors(rows, query, query, 1.0), candidates.vectors)
    assert torch.equal(found.mask, own[rows, None] != own.repeat_interleave(2))
    plain: Any = NEGATIVES.build("views")(batch, ViewPositives()(batch))
    assert torch.equal(found.similarity, plain.logits(Anchors(rows, query, query, 1.0), plain.vectors).similarity)


def test_its_experiment_is_registered_and_no_part_of_the_package_knows_it(plugin: Any) -> None:
    experiment = EXPERIMENTS["known-purity"]
    assert experiment.seeds == (100,)
    assert all(row.settings["images.holdout"] == 0.1 for row in experiment.configurations)
