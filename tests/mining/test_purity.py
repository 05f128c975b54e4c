"""Purity of mined positives (figure 1) against loops, and in training."""

import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import normalize

import psm
from psm.data import ImageDataset, ImageStore
from psm.mining.memory_bank import MemoryBank
from psm.mining.purity import finalize, purity
from psm.utils.errors import UserError


def slow_purity(bank: Any, keys: Any, ids: Any, labels: Any, own: Any) -> Any:
    shares = {"purity_top1": [], "purity_top5": [], "hit_top5": []}
    for key, image in zip(keys, ids.tolist(), strict=True):
        rows = [
            (torch.dot(normalize(key, dim=0), bank.rows[place]).item(), int(bank.ids[place]))
            for place in range(int(bank.fill))
            if own or int(bank.ids[place]) != image
        ]
        if len(rows) < 5:
            continue
        best = [labels[other] == labels[image] for _, other in sorted(rows, reverse=True)[:5]]
        shares["purity_top1"].append(float(best[0]))
        shares["purity_top5"].append(statistics.fmean(map(float, best)))
        shares["hit_top5"].append(float(any(best)))
    return {name: statistics.fmean(values) for name, values in shares.items() if values}


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("pushed", [3, 5, 20, 40])
def test_purity_against_loops(pushed: Any, own: Any) -> None:
    draws = torch.Generator().manual_seed(pushed)
    labels = torch.randint(0, 3, (30,), generator=draws)
    bank = MemoryBank(30, 4)
    bank.enqueue(torch.randn(pushed, 4, generator=draws), torch.randint(0, 30, (pushed,), generator=draws))
    keys, ids = torch.randn(12, 4, generator=draws), torch.arange(12)
    found = finalize({name: value.item() for name, value in purity(bank, keys, ids, labels, own).items()})
    expected = slow_purity(bank, keys, ids, labels, own)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, abs=1e-6)


def test_purity_over_steps_counts_queries_that_were_served() -> None:
    means = {"loss": 2.0, "purity_top1": 0.25, "purity_top5": 0.2, "hit_top5": 0.3, "purity_served": 0.5}
    assert finalize(means) == {"loss": 2.0, "purity_top1": 0.5, "purity_top5": 0.4, "hit_top5": 0.6}
    assert finalize(means | {"purity_served": 0.0}) == {"loss": 2.0}
    assert finalize({"loss": 2.0}) == {"loss": 2.0}


@pytest.fixture(scope="module")
def moco(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from helpers import SMALL

    out = tmp_path_factory.mktemp("runs") / "moco"
    return psm.pretrain(out, method="mocov2", **SMALL | {"monitor": {"purity": True, "every": 2}})


def test_purity_is_recorded_and_changes_nothing(tmp_path: Path, small: dict[str, Any], moco: Any) -> None:
    for record in moco.metrics:
        assert 0 <= record["purity_top5"] <= record["hit_top5"] <= 1
        assert 0 <= record["purity_top1"] <= 1
        assert "purity_served" not in record
    blind = psm.pretrain(tmp_path / "a", method="mocov2", **small)
    assert [record["loss"] for record in blind.metrics] == [record["loss"] for record in moco.metrics]
    assert "purity_top1" not in blind.metrics[0]


def test_purity_is_refused_without_a_bank_or_labels(tmp_path: Path, small: dict[str, Any]) -> None:
    small["monitor"]["purity"] = True
    with pytest.raises(UserError, match="method=simclr as set has none"):
        psm.pretrain(tmp_path / "a", method="simclr", **small)
    images = ImageStore(torch.zeros(40, 3, 16, 16, dtype=torch.uint8))
    with pytest.raises(UserError, match="has none: leave it at false"):
        psm.pretrain(tmp_path / "a", **small | {"data": ImageDataset("blind", images, None, ())})
    with pytest.raises(UserError, match=r"bank\.size=5 or more"):
        psm.pretrain(tmp_path / "a", **small | {"bank": {"size": 4}, "positives": {"k": 3}})
    assert not (tmp_path / "a").exists()
