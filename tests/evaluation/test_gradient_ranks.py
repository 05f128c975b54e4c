"""Gradients of the most similar negatives (figure 2) against autograd and loops."""

import math
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import normalize

import psm
from psm.config.schema import ImagesConfig
from psm.data import load_dataset
from psm.evaluation.gradient_ranks import by_rank, gradient_ranks, negative_gradients
from psm.experiments.results import has_gradients
from psm.mining.memory_bank import MemoryBank
from psm.utils.errors import UserError


@pytest.fixture(scope="module")
def moco(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from helpers import SMALL

    out = tmp_path_factory.mktemp("runs") / "moco"
    return psm.pretrain(out, method="mocov2", **SMALL | {"monitor": {"purity": True, "every": 2}})


def test_gradients_against_autograd() -> None:
    """Of InfoNCE and of eq. 2, with respect to a query that autograd normalizes itself."""
    draws = torch.Generator().manual_seed(1)
    bank = MemoryBank(9, 5).double()
    bank.enqueue(torch.randn(7, 5, generator=draws, dtype=torch.double), torch.arange(7))
    query, key = (normalize(torch.randn(3, 5, generator=draws, dtype=torch.double), dim=1) for _ in range(2))
    temperature, ranks = 0.5, 6
    found = negative_gradients(query, key, bank, temperature, ranks)
    for row in range(3):
        raw = query[row].clone().requires_grad_()
        unit = normalize(raw, dim=0)
        negatives = bank.rows[:7]
        order = (negatives @ query[row]).argsort(descending=True)
        similarity = negatives @ unit
        positive = unit @ key[row]
        loss = torch.logsumexp(torch.cat([positive[None], similarity]) / temperature, 0) - positive / temperature
        pulls = torch.autograd.grad(loss, similarity, retain_graph=True)[0]  # the softmax over all candidates, over t
        total = torch.autograd.grad(loss, raw, retain_graph=True)[0]
        parts = [torch.autograd.grad(positive, raw, retain_graph=True)[0] * (pulls.sum() * -1)]
        for rank, place in enumerate(order[:ranks]):
            turn = torch.autograd.grad(similarity[place], raw, retain_graph=True)[0]
            parts.append(pulls[place] * turn)
            assert found.softmax[row, rank].item() == pytest.approx(pulls[place].item(), rel=1e-9)
            assert found.grad_norm[row, rank].item() == pytest.approx(turn.norm().item(), rel=1e-9)
            # eq. 2: the probability is what a sigmoid gave, so the loss of a negative changes with its logit by s.
            s = similarity[place].detach().clamp(min=0)
            logit = torch.logit(s.clamp(1e-12, 1 - 1e-12)).requires_grad_()
            slope = torch.autograd.grad(-torch.log1p(-torch.sigmoid(logit)), logit)[0]
            assert found.binary[row, rank].item() == pytest.approx(slope.item(), abs=1e-9)
            assert found.ids[row, rank] == bank.ids[place]
        last = order[ranks]
        turn = torch.autograd.grad(similarity[last], raw, retain_graph=True)[0]
        assert torch.allclose(sum(parts) + pulls[last] * turn, total, atol=1e-9)
        assert found.positive_rank[row] == 1 + (negatives @ query[row] > query[row] @ key[row]).sum()


def test_gradients_by_rank_against_loops() -> None:
    draws = torch.Generator().manual_seed(2)
    bank = MemoryBank(12, 4)
    bank.enqueue(torch.randn(12, 4, generator=draws), torch.arange(12) % 6)
    query, key = (normalize(torch.randn(5, 4, generator=draws), dim=1) for _ in range(2))
    labels, ids = torch.tensor([0, 1, 0, 1, 0, 1]), torch.arange(5)
    found = negative_gradients(query, key, bank, 0.5, 8, exclude_ids=ids)
    for rank in by_rank(found, ids, labels):
        slopes = [row[rank.rank - 1].item() for row in found.softmax]
        assert rank.softmax_slope_mean == pytest.approx(statistics.fmean(slopes), rel=1e-5)
        assert rank.softmax_slope_variance == pytest.approx(statistics.pvariance(slopes), rel=1e-4, abs=1e-12)
        pairs = zip(found.binary, found.grad_norm, strict=True)
        lengths = [(slope[rank.rank - 1] * turn[rank.rank - 1]).item() for slope, turn in pairs]
        assert rank.binary_length_mean == pytest.approx(statistics.fmean(lengths), rel=1e-5)
        assert rank.binary_length_variance == pytest.approx(statistics.pvariance(lengths), rel=1e-4, abs=1e-12)
        images = [row[rank.rank - 1].item() for row in found.ids]
        same = [labels[image] == labels[query] for query, image in enumerate(images)]
        assert rank.same_class == pytest.approx(sum(map(int, same)) / 5)
        assert rank.own_image == 0  # a query may not meet its own image here


def test_gradients_of_a_run(moco: Any) -> None:
    data = load_dataset("shapes", ImagesConfig(limit=100, size=16), progress=False)
    ranks = gradient_ranks(moco.out / "checkpoints" / "last.ckpt", data, queries=20, ranks=200)
    assert [rank["rank"] for rank in ranks] == list(range(1, 51))  # the bank holds no more
    similarity = [rank["similarity"] for rank in ranks]
    assert similarity == sorted(similarity, reverse=True)
    assert all(math.isfinite(value) for rank in ranks for value in rank.values())
    assert ranks[0]["queries"] == 20
    assert has_gradients({"gradients": ranks})
    assert not has_gradients({"gradients": [{"rank": 1}]})  # of an earlier version: measured again
    again = gradient_ranks(moco.out / "checkpoints" / "last.ckpt", data, queries=20, ranks=200)
    assert again == ranks


def test_gradients_need_a_bank(tmp_path: Path, small: dict[str, Any]) -> None:
    run = psm.pretrain(tmp_path / "a", method="simclr", **small | {"epochs": 1})
    with pytest.raises(UserError, match="has no memory bank"):
        gradient_ranks(run.out / "checkpoints" / "last.ckpt", run.data)
