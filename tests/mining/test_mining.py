"""PSM's loss: golden vectors, slow references, identities, and the corners where others return NaN."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import normalize

import psm.mining.pnsm
import reference
from helpers import close, filled, golden, method, pair_loss, pair_of, random_vectors, without_pnsm
from psm.kernels import similarity
from psm.losses.functional import masked_logsumexp
from psm.mining.memory_bank import MemoryBank
from psm.mining.pnsm import keep_probability, mine_negatives
from psm.mining.positives import soft_weights
from psm.models.outputs import ViewPair


@pytest.mark.parametrize("name", ["psm", "snclr"])
def test_golden_without_draws(name: str) -> None:
    g = golden(name)
    query = g["q1"].clone().requires_grad_()
    pair = pair_of(query, g["z2"], g["z1"], g.get("z1_target", g["z2"]))
    spec = without_pnsm() if name == "psm" else method("snclr")
    output = pair_loss(pair, spec, filled(g["bank"]))
    output.loss.backward()
    assert close(output.loss, g["loss_all" if name == "psm" else "loss"])
    assert close(query.grad, g["dq1_all" if name == "psm" else "dq1"])


def test_golden_neighbors_and_probabilities() -> None:
    g = golden("psm")
    mined = filled(g["bank"]).search(g["z2"], 5)
    assert torch.equal(mined.ids, g["neighbour_index"])
    q, z2, other = (normalize(g[name], dim=1) for name in ("q1", "z2", "z1_target"))
    positive = (q * z2).sum(1)
    assert close(keep_probability(q @ torch.cat([z2, other]).T, positive, g["a"]), g["probability_hard"])
    candidates = torch.cat([z2[:, None], mined.vectors], 1)
    similarity = torch.einsum("nd,mkd->nmk", q, candidates).flatten(1)
    assert close(keep_probability(similarity, positive, g["a"]), g["probability_soft"].flatten(1))


@pytest.mark.parametrize("terms", [("soft", "hard"), ("soft",), ("hard",)])
def test_golden_with_given_draws(monkeypatch: pytest.MonkeyPatch, terms: Any) -> None:
    g = golden("psm")
    both_views = torch.stack(g["keep_hard"].split(8, dim=1), 2)
    draws = {"soft": g["keep_soft"].flatten(1), "hard": both_views.flatten(1)}
    given_draws = iter([draws[term] for term in terms])
    monkeypatch.setattr(psm.mining.pnsm, "mine_negatives", lambda *_: next(given_draws))
    query = g["q1"].clone().requires_grad_()
    pair = pair_of(query, g["z2"], g["z1"], g["z1_target"])
    spec = method(loss={f"{term}_weight": float(term in terms) for term in ("soft", "hard")})
    output = pair_loss(pair, spec, filled(g["bank"]))
    output.loss.backward()
    assert close(output.loss, sum(g[f"{term}_mined"] for term in terms))
    if len(terms) == 2:
        assert close(query.grad, g["dq1_mined"])


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    count=st.integers(2, 6),
    width=st.integers(2, 7),
    rows=st.integers(1, 12),
    k=st.integers(0, 5),
    temperature=st.sampled_from([0.05, 0.2, 0.5, 1.0]),
    weighting=st.sampled_from(["V0", "V1", "V2", "V3", "V4"]),
    hard=st.sampled_from([0.0, 0.5, 1.0]),
    copies=st.booleans(),
)
def test_equals_loops(
    seed: int, count: Any, width: Any, rows: Any, k: Any, temperature: Any, weighting: Any, hard: Any, copies: Any
) -> None:
    """Any shape, any k (more than the bank holds too), stale copies of the queries in the bank."""
    query, projection, key, other, bank = random_vectors(seed, *[(count, width)] * 4, (rows, width))
    ids = torch.arange(count)
    bank_ids = torch.arange(rows) if copies else torch.arange(rows) + 100
    query.requires_grad_()
    spec = without_pnsm(
        positives={"k": k, "weights": weighting},
        loss={"temperature": temperature, "hard_weight": hard},
        bank={"size": rows + 5},
    )
    output = pair_loss(pair_of(query, key, projection, other), spec, filled(bank, bank_ids, rows + 5), ids)
    (gradient,) = torch.autograd.grad(output.loss, query)
    slow = reference.soft_loss(query, projection, key, bank, k, temperature, weighting, bank_ids, ids)
    slow = slow + hard * reference.hard_loss(query, key, other, temperature)
    assert close(output.loss, slow)
    assert close(gradient, torch.autograd.grad(slow, query)[0])


@pytest.mark.parametrize("a", [0.5, 40.0])
def test_pnsm_equals_loops(monkeypatch: pytest.MonkeyPatch, a: Any) -> None:
    """The same draws in the same places, soft and hard, value and gradient."""
    count, width, k = 5, 4, 2
    query, projection, key, other, bank = random_vectors(1, *[(count, width)] * 4, (9, width))
    masks = []

    def spying(similarity: Any, positive: Any, a: Any, generator: Any) -> Any:
        masks.append(mine_negatives(similarity, positive, a, generator))
        return masks[-1]

    monkeypatch.setattr(psm.mining.pnsm, "mine_negatives", spying)
    query.requires_grad_()
    spec = method(positives={"k": k}, sampler={"a": a})
    draws = torch.Generator().manual_seed(3)
    output = pair_loss(pair_of(query, key, projection, other), spec, filled(bank), None, draws)
    soft, hard = (m.view(count, count, -1) for m in masks)
    slow = reference.soft_loss(query, projection, key, bank, k, 0.5, keep=lambda i, image, j: soft[i, image, j])
    slow = slow + reference.hard_loss(query, key, other, 0.5, keep=lambda i, image, view: hard[i, image, view])
    assert close(output.loss, slow)
    assert close(*(torch.autograd.grad(x, query)[0] for x in (output.loss, slow)))
    assert 0 < output.metrics["negatives_kept"] < 1


def test_pnsm_keeps_as_often_as_eq_8_says() -> None:
    similarity, positive = torch.linspace(-1, 1, 21).expand(3, -1), torch.tensor([-0.5, 0.1, 0.9])
    draws = torch.Generator().manual_seed(0)
    trials = 4000
    kept = sum(mine_negatives(similarity, positive, 2.0, draws).double() for _ in range(trials)) / trials
    for row in range(3):
        for column in range(21):
            p = float(torch.exp(-2.0 * (similarity[row, column] - positive[row]) ** 2))
            assert abs(kept[row, column] - p) < 5 * (p * (1 - p) / trials) ** 0.5 + 1e-9


def identity_inputs() -> Any:
    query, projection, key, other, bank = random_vectors(7, *[(6, 5)] * 4, (20, 5))
    return pair_of(query, key, projection, other), filled(bank)


def test_shapes_that_would_broadcast_are_refused() -> None:
    """A column of positives would otherwise give a mask (N, N, M)."""
    for positives in (torch.rand(3, 1), torch.rand(4), torch.rand(())):
        with pytest.raises(ValueError, match=r"are not \(N, M\) and \(N,\)"):
            mine_negatives(torch.rand(3, 4), positives, a=0.5)
    assert mine_negatives(torch.rand(3, 4), torch.rand(3), a=0.5).shape == (3, 4)


def test_a_of_zero_changes_nothing() -> None:
    pair, bank = identity_inputs()
    draws = torch.Generator().manual_seed(0)
    assert (
        pair_loss(pair, method(sampler={"a": 0.0}), bank, None, draws).loss
        == pair_loss(pair, without_pnsm(), bank).loss
    )


def test_psm_without_hard_and_pnsm_is_snclr() -> None:
    pair, bank = identity_inputs()
    assert (
        pair_loss(pair, without_pnsm(loss={"hard_weight": 0.0}), bank).loss
        == pair_loss(pair, method("snclr"), bank).loss
    )


def test_no_neighbors_leave_plain_infonce_over_keys() -> None:
    pair, bank = identity_inputs()
    logits = pair.query @ pair.key.T / 0.5
    plain = torch.nn.functional.cross_entropy(logits, torch.arange(6))
    without = without_pnsm(positives={"k": 0}, loss={"hard_weight": 0.0})
    assert close(pair_loss(pair, without, bank).loss, plain)
    empty = MemoryBank(20, 5).double()
    assert close(pair_loss(pair, without_pnsm(loss={"hard_weight": 0.0}), empty).loss, plain)
    by_key = without_pnsm(positives="view", loss={"hard_weight": 0.0})
    assert close(pair_loss(pair, by_key, bank).loss, plain)


def test_partly_filled_bank_mines_nothing_until_k_usable_rows() -> None:
    pair, _ = identity_inputs()
    rows = random_vectors(9, (5, 5))[0]
    four, five = MemoryBank(20, 5).double(), MemoryBank(20, 5).double()
    four.enqueue(rows[:4], torch.arange(4) + 50)
    five.enqueue(rows, torch.arange(5) + 50)
    assert pair_loss(pair, without_pnsm(), four).metrics["mined_share"] == 0
    assert pair_loss(pair, without_pnsm(), five).metrics["mined_share"] == 1
    # A row of the query's own image is not usable: that query alone has only four.
    own = MemoryBank(20, 5).double()
    own.enqueue(rows, torch.tensor([50, 51, 52, 53, 2]))
    ids = torch.arange(6)
    assert close(pair_loss(pair, without_pnsm(), own, ids).metrics["mined_share"], 5 / 6)
    assert pair_loss(pair, without_pnsm(bank={"allow_self": True}), own, ids).metrics["mined_share"] == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("temperature", [0.01, 0.5])
@pytest.mark.parametrize("case", ["random", "identical", "opposite", "all dropped", "empty bank", "bank of the batch"])
def test_finite_value_and_gradient(dtype: torch.dtype, temperature: Any, case: Any) -> None:
    query, projection, key, other, rows = random_vectors(3, *[(4, 6)] * 4, (12, 6), dtype=torch.float32)
    if case == "identical":
        query = projection = key = other = torch.ones(4, 6)
        rows = torch.ones(12, 6)
    elif case == "opposite":
        key = -query
    elif case == "bank of the batch":
        rows = key
    a = 1e9 if case == "all dropped" else 0.5
    query = query.to(dtype).requires_grad_()
    bank = MemoryBank(12, 6)
    if case != "empty bank":
        bank.enqueue(rows, torch.arange(len(rows)) + 100)
    pair = pair_of(query, *(x.to(dtype) for x in (key, projection, other)))
    spec = method(loss={"temperature": temperature}, sampler={"a": a}, positives={"k": 3})
    output = pair_loss(pair, spec, bank, torch.arange(4), torch.Generator().manual_seed(0))
    output.loss.backward()
    assert torch.isfinite(output.loss)
    assert torch.isfinite(query.grad).all()
    assert all(torch.isfinite(fact) for fact in output.metrics.values())


def test_all_negatives_dropped_leaves_the_positives(monkeypatch: pytest.MonkeyPatch) -> None:
    pair, bank = identity_inputs()
    monkeypatch.setattr(psm.mining.pnsm, "mine_negatives", lambda s, *_: torch.zeros_like(s, dtype=torch.bool))
    assert close(pair_loss(pair, method(loss={"soft_weight": 0.0}), bank).loss, 0.0)


def test_chance_is_the_loss_of_equal_similarities() -> None:
    ones = torch.ones(4, 6, dtype=torch.float64)
    pair = pair_of(ones, ones, ones, ones)
    bank = filled(torch.ones(8, 6, dtype=torch.float64), torch.arange(8) + 50)
    output = pair_loss(pair, method(), bank, torch.arange(4), torch.Generator().manual_seed(0))
    assert close(output.loss, output.metrics["chance"])


def test_weights_sum_and_variants() -> None:
    similarity = torch.tensor([[0.9, 0.5, 0.1, -0.2]], dtype=torch.float64)
    for weighting in ("V0", "V1", "V2", "V3", "V4"):
        assert close(soft_weights(similarity, weighting)[0], reference.soft_weights(similarity[0].tolist(), weighting))
    equal = torch.full((1, 5), 0.3)
    assert close(soft_weights(equal, "V1").sum(), 1.0, 1e-6)
    with pytest.raises(ValueError, match="V5"):
        soft_weights(similarity, "V5")


def test_masked_logsumexp_has_zero_gradient_where_nothing_is_kept() -> None:
    values = torch.randn(2, 3, requires_grad=True)
    keep = torch.tensor([[True, False, True], [False, False, False]])
    result = masked_logsumexp(values, keep)
    assert result[1] == -torch.inf
    result.exp().sum().backward()
    assert torch.isfinite(values.grad).all()
    assert (values.grad[~keep] == 0).all()
    assert torch.allclose(values.grad[0, ::2], values.detach()[0, ::2].exp())


def test_masked_logsumexp_hides_no_damage() -> None:
    values = torch.tensor([[1.0, torch.nan], [torch.nan, torch.nan], [1.0, 2.0]])
    assert masked_logsumexp(values).isnan().tolist() == [True, True, False]
    assert masked_logsumexp(values, torch.tensor([[True, False]] * 3)).isnan().tolist() == [False, True, False]


def test_masked_logsumexp_of_nothing() -> None:
    values = torch.zeros(2, 0, requires_grad=True)
    result = masked_logsumexp(values)
    assert (result == -torch.inf).all()
    result.sum().backward()


@pytest.mark.parametrize("own", [True, False])
def test_a_bank_without_mining_in_single_precision_equals_that_in_double(
    own: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MoCo v2: all rows in one, where that is compiled, or, without a query's own, by the matrix."""
    monkeypatch.setattr(similarity, "MIN_PAIRS", 0)
    *vectors, rows = (normalize(x, dim=1) for x in random_vectors(5, *[(40, 32)] * 4, (300, 32)))
    outputs = []
    for dtype in (torch.float32, torch.float64):
        query, key, projection, other = (x.to(dtype) for x in vectors)
        bank = filled(rows).to(dtype)
        query.requires_grad_()
        found = pair_loss(
            ViewPair(query, key, projection, other), method("mocov2", bank={"allow_self": own}), bank, bank.ids[:40]
        )
        outputs.append([found.loss.detach(), *torch.autograd.grad(found.loss, query), *found.metrics.values()])
    torch.testing.assert_close(*outputs, check_dtype=False, atol=1e-6, rtol=1e-5)


def test_queries_alone_carry_the_gradient() -> None:
    query, projection, key, other, rows = (x.requires_grad_() for x in random_vectors(2, *[(4, 6)] * 4, (12, 6)))
    pair_loss(
        ViewPair(query, key.detach(), projection, other.detach()), method(), filled(rows.detach())
    ).loss.backward()
    assert query.grad.abs().sum() > 0
    assert projection.grad is None  # the weights of eq. 5 carry none
