"""Choices of the rule knn: mixed rows, agreement, a least similarity, a share, a temperature, a late start."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import normalize

import reference
from helpers import close, filled, method, pair_loss, pair_of, random_vectors, without_pnsm
from psm.losses.method_loss import method_loss
from psm.mining.batch import MiningBatch
from psm.mining.positives import POSITIVES, NeighborPositives
from psm.models.outputs import Embeddings

NEUTRAL = {"temperature": 1.0, "mix": False, "agree": False, "min_similarity": -1.0, "share": 1.0, "start": 0.0}


def inputs(seed: int = 7, count: int = 6, width: int = 5, rows: int = 20) -> Any:
    query, projection, key, other, bank = random_vectors(seed, *[(count, width)] * 4, (rows, width))
    return query.requires_grad_(), projection, key, other, bank


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 9999),
    count=st.integers(2, 5),
    width=st.integers(2, 6),
    rows=st.integers(1, 12),
    k=st.integers(1, 5),
    weighting=st.sampled_from(["V0", "V1", "V2", "V3", "V4"]),
    temperature=st.sampled_from([0.1, 1.0]),
    least=st.sampled_from([-1.0, 0.0, 0.4]),
    mix=st.booleans(),
    agree=st.booleans(),
)
def test_equals_loops(
    seed: int, count: int, width: int, rows: int, k: int, weighting: str, temperature: Any, least: Any, mix: Any,
    agree: Any,
) -> None:  # fmt: skip
    """Value and gradient of every combination, also where all rows of a query are dropped."""
    query, projection, key, other, bank = inputs(seed, count, width, rows)
    chosen = {"temperature": temperature, "min_similarity": least, "mix": mix, "agree": agree}
    spec = without_pnsm(
        positives={"k": k, "weights": weighting, **chosen}, loss={"hard_weight": 0.0}, bank={"size": rows + 5}
    )
    draws = torch.Generator().manual_seed(seed)
    pair, memory = pair_of(query, key, projection, other), filled(bank, None, rows + 5)
    loss = pair_loss(pair, spec, memory, positive_generator=draws).loss
    shares = torch.rand(count, k, 1, generator=torch.Generator().manual_seed(seed))[..., 0]
    slow = reference.soft_loss(
        query, projection, key, bank, k, 0.5, weighting,
        weight_temperature=temperature, min_similarity=least, agree_with=other if agree else None,
        shares=shares if mix else None,
    )  # fmt: skip
    assert close(loss, slow)
    assert close(*(torch.autograd.grad(x, query)[0] for x in (loss, slow)))


@pytest.mark.parametrize("weights", ["V0", "V1", "V2", "V3", "V4"])
def test_neutral_values_change_no_bit(weights: str) -> None:
    query, projection, key, other, bank = inputs()
    pair, memory = pair_of(query, key, projection, other), filled(bank)
    outputs = [
        pair_loss(pair, method(positives={"weights": weights} | more), memory, None, torch.Generator().manual_seed(1))
        for more in ({}, NEUTRAL)
    ]
    assert outputs[0].loss == outputs[1].loss
    assert outputs[0].metrics == outputs[1].metrics
    assert torch.equal(*(torch.autograd.grad(output.loss, query, retain_graph=True)[0] for output in outputs))


def test_nothing_dropped_is_everything_found() -> None:
    """Views that mine the same agree on all, and a similarity that every row has drops none."""
    query, projection, key, _, bank = inputs()
    pair, memory = pair_of(query, key, projection, key), filled(bank)
    plain, same = (
        pair_loss(pair, without_pnsm(positives=given), memory)
        for given in ({}, {"agree": True, "min_similarity": -0.9999})
    )
    assert close(plain.loss, same.loss, 1e-12)
    assert close(plain.metrics["mined_similarity"], same.metrics["mined_similarity"])


def test_everything_dropped_leaves_the_key() -> None:
    query, projection, key, other, bank = inputs()
    pair, memory = pair_of(query, key, projection, other), filled(bank)
    alone = pair_loss(pair, without_pnsm(positives={"k": 0}), memory).loss
    dropped = pair_loss(pair, without_pnsm(positives={"min_similarity": 1.0}), memory)
    assert close(dropped.loss, alone)
    assert dropped.metrics["mined_share"] == 0
    assert dropped.metrics["mined_similarity"] == 0


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 9999), count=st.integers(1, 6), k=st.integers(1, 4), share=st.floats(0.01, 0.99))
def test_a_share_is_the_least_similarity_that_so_many_rows_have(seed: int, count: int, k: int, share: float) -> None:
    query, projection, key, other, bank = inputs(seed, count)
    pair, memory = pair_of(query, key, projection, other), filled(bank)
    ranked = sorted((normalize(key, dim=1) @ normalize(bank, dim=1).T).topk(k, dim=1).values.flatten().tolist())
    counted = max(1, round(share * count * k))
    least = {"k": k, "min_similarity": ranked[-counted] - 1e-9}
    found, expected = (
        pair_loss(pair, without_pnsm(positives=given), memory) for given in ({"k": k, "share": share}, least)
    )
    assert close(found.loss, expected.loss)
    assert close(found.metrics["mined_share"], counted / (count * k))
    assert close(found.metrics["mined_similarity"], expected.metrics["mined_similarity"])


def test_rows_agree_by_image() -> None:
    """A row counts if the other view mined any row of its image."""
    key, other = torch.eye(4, dtype=torch.float64)[:1], torch.eye(4, dtype=torch.float64)[1:2]
    rows = torch.tensor([[9, 0, 0.5, 0], [9, 0, 1, 0], [1, 9, 0, 0], [0, 9, 0, 1]], dtype=torch.float64)
    memory = filled(rows, torch.tensor([10, 11, 11, 12]))
    batch = MiningBatch(key, key, key, other, torch.tensor([0]), memory)
    positives = NeighborPositives(k=2, agree=True)(batch)
    assert positives.ids.tolist() == [[0, -1, 11]]
    assert positives.mask.tolist() == [[True, False, True]]
    assert close(positives.weights, [[1.0, 0.0, 1.0]])
    with pytest.raises(ValueError, match="pass query_view_key"):
        NeighborPositives(k=2, agree=True)(batch._replace(query_view_key=None))


def test_mixed_rows_lie_between_row_and_key_and_weigh_as_the_rows() -> None:
    query, projection, key, other, bank = inputs()
    batch = MiningBatch(*pair_of(query, key, projection, other), torch.arange(6) + 50, filled(bank))
    plain = NeighborPositives(k=3)(batch)
    mixed = NeighborPositives(k=3, mix=True)(batch._replace(positive_generator=torch.Generator().manual_seed(2)))
    assert torch.equal(mixed.weights, plain.weights)
    assert torch.equal(mixed.ids, plain.ids)
    assert torch.equal(mixed.vectors[:, 0], plain.vectors[:, 0])
    assert close(mixed.vectors.norm(dim=2), torch.ones(6, 4))
    to_key = torch.einsum("nd,nkd->nk", batch.key, mixed.vectors[:, 1:])
    assert (to_key >= torch.einsum("nd,nkd->nk", batch.key, plain.vectors[:, 1:]) - 1e-12).all()
    x = torch.rand(6, 3, 1, generator=torch.Generator().manual_seed(2)).double()
    assert close(mixed.vectors[:, 1:], normalize(x * plain.vectors[:, 1:] + (1 - x) * batch.key[:, None], dim=2))


def test_a_key_with_a_gradient_keeps_it_beside_mixed_rows() -> None:
    """SimCLR with neighbors: the key learns, what is mixed from it does not."""
    spec = method("simclr", positives={"rule": "knn", "k": 2, "mix": True})
    query, projection, _, other, bank = inputs()
    key = normalize(random_vectors(3, (6, 5))[0], dim=1).requires_grad_()
    batch = MiningBatch(*pair_of(query, key.detach(), projection, other))._replace(key=key, bank=filled(bank))
    vectors = spec.positives(batch).vectors
    vectors[:, 0].sum().backward(retain_graph=True)
    assert (key.grad == 1).all()
    key.grad = None
    vectors[:, 1:].sum().backward()
    assert key.grad is None or not key.grad.any()


def test_mixing_changes_no_other_draw_and_both_directions_draw_their_own() -> None:
    """PNSM keeps the same negatives wherever their similarities are the same: those of L_hard."""
    embeddings = Embeddings(*random_vectors(1, *[(2, 6, 5)] * 3))
    memory, seen = filled(inputs()[4]), []
    for mix in (False, True):
        spec = method(positives={"mix": mix, "k": 1}, loss={"soft_weight": 1.0})
        draws, positive = (torch.Generator().manual_seed(seed) for seed in (3, 4))
        method_loss(embeddings, spec.criterion, memory, None, draws, positive_generator=positive)
        seen.append((draws.get_state(), positive.get_state()))
    assert torch.equal(seen[0][0], seen[1][0])
    fresh = torch.Generator().manual_seed(4)
    assert torch.equal(seen[0][1], fresh.get_state())
    torch.rand(2, 6, 1, 1, generator=fresh)
    assert torch.equal(seen[1][1], fresh.get_state())


def test_mining_starts_late() -> None:
    query, projection, key, other, bank = inputs()
    pair, memory = pair_of(query, key, projection, other), filled(bank)
    late = without_pnsm(positives={"start": 0.25})
    before, after = (pair_loss(pair, late, memory, progress=share) for share in (0.2499, 0.25))
    assert before.loss == pair_loss(pair, without_pnsm(positives={"k": 0}), memory).loss
    assert after.loss == pair_loss(pair, without_pnsm(), memory).loss
    assert before.metrics.keys() == after.metrics.keys()
    assert before.metrics["mined_share"] == 0


def test_what_a_rule_says_of_itself() -> None:
    assert NeighborPositives().describe() == "key + 5 bank rows (V0)"
    every = POSITIVES.build(
        {"rule": "knn", "mix": True, "agree": True, "temperature": 0.1, "min_similarity": 0.3, "start": 0.1}
    )
    assert every.describe() == "key + 5 bank rows (V0, mixed, agreed, t=0.1, s ≥ 0.3, from 10% on)"
    assert every.without_draws() == NeighborPositives(temperature=0.1, min_similarity=0.3)
    assert "mixed with the key" in every.remark
    assert not NeighborPositives().remark
