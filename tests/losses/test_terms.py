"""HCL's weighting under PSM, the decoupled denominator, the redundancy term, more than two views: against loops."""

from itertools import permutations
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import psm.mining.pnsm
import reference
from helpers import batch_loss, close, filled, method, pair_loss, pair_of, random_vectors, without_pnsm
from psm.losses.functional import contrastive_loss, joined_contrastive_loss, redundancy_loss
from psm.methods import METHODS, get_method
from psm.mining.batch import MiningBatch
from psm.mining.memory_bank import MemoryBank
from psm.mining.pnsm import mine_negatives
from psm.models.outputs import Embeddings, directions, view_pairs
from psm.ops import masked_logsumexp


def inputs(seed: int, count: int = 5, width: int = 4, rows: int = 9) -> Any:
    query, projection, key, other, bank = random_vectors(seed, *[(count, width)] * 4, (rows, width))
    return query.requires_grad_(), projection, key, other, bank


def hard_term(query: Any, key: Any, other: Any, mass: Any, keep: Any = None) -> Any:
    """Eq. 4 with another weight of the negatives."""
    total = 0.0
    for i in range(len(query)):
        positive = torch.exp(reference.cosine(query[i], key[i]) / 0.5)
        negatives = [
            torch.exp(reference.cosine(query[i], vectors[j]) / 0.5)
            for j in range(len(query))
            if j != i
            for view, vectors in enumerate((key, other))
            if keep is None or keep(i, j, view)
        ]
        total = total - torch.log(positive / (positive + mass(positive, negatives)))
    return total / len(query)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 9999), tau=st.sampled_from([0.0, 0.1]), beta=st.sampled_from([0.0, 1.0, 2.0]))
def test_hard_weighting_under_psm_equals_loops(seed: int, tau: float, beta: float) -> None:
    """Both terms weigh their own negatives; the key, not a mined row, is the positive that is subtracted."""
    query, projection, key, other, bank = inputs(seed)
    spec = without_pnsm(weighting={"name": "hard", "tau": tau, "beta": beta}, positives={"k": 2})
    loss = pair_loss(pair_of(query, key, projection, other), spec, filled(bank)).loss
    mass = reference.hard_mass(0.5, tau, beta)
    slow = reference.soft_loss(query, projection, key, bank, 2, 0.5, mass=mass)
    slow = slow + hard_term(query, key, other, mass)
    assert close(loss, slow)
    assert close(*(torch.autograd.grad(x, query)[0] for x in (loss, slow)))


def test_hard_weighting_counts_what_pnsm_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    query, projection, key, other, bank = inputs(3)
    masks = []

    def spying(*given: Any) -> Any:
        masks.append(mine_negatives(*given))
        return masks[-1]

    monkeypatch.setattr(psm.mining.pnsm, "mine_negatives", spying)
    spec = method(weighting="hard", positives={"k": 2}, sampler={"a": 3.0})
    draws = torch.Generator().manual_seed(3)
    loss = pair_loss(pair_of(query, key, projection, other), spec, filled(bank), None, draws).loss
    soft, hard = (m.view(5, 5, -1) for m in masks)
    mass = reference.hard_mass(0.5, 0.1, 1.0)
    slow = reference.soft_loss(query, projection, key, bank, 2, 0.5, mass=mass, keep=lambda i, j, c: soft[i, j, c])
    slow = slow + hard_term(query, key, other, mass, lambda i, j, view: hard[i, j, view])
    assert 0 < soft.double().mean() < 1
    assert close(loss, slow)
    assert close(*(torch.autograd.grad(x, query)[0] for x in (loss, slow)))


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 9999), k=st.integers(0, 3), weighting=st.sampled_from(["sum", "hard"]))
def test_decoupled_equals_loops(seed: int, k: int, weighting: str) -> None:
    query, projection, key, other, bank = inputs(seed)
    spec = without_pnsm(objective="decoupled", weighting=weighting, positives={"k": k}, loss={"hard_weight": 0.0})
    loss = pair_loss(pair_of(query, key, projection, other), spec, filled(bank)).loss
    mass = reference.hard_mass(0.5, 0.1, 1.0) if weighting == "hard" else None
    slow = reference.soft_loss(query, projection, key, bank, k, 0.5, mass=mass, in_denominator=False)
    assert close(loss, slow)
    assert close(*(torch.autograd.grad(x, query)[0] for x in (loss, slow)))


def test_decoupled_is_finite_without_negatives_and_knows_chance(monkeypatch: pytest.MonkeyPatch) -> None:
    query, projection, key, other, bank = inputs(1)
    spec = method(objective="decoupled")
    with monkeypatch.context() as patched:
        patched.setattr(psm.mining.pnsm, "mine_negatives", lambda s, *_: torch.zeros_like(s, dtype=torch.bool))
        output = pair_loss(pair_of(query, key, projection, other), spec, filled(bank))
        assert torch.isfinite(output.loss)
        assert torch.isfinite(output.metrics["chance"])
        assert torch.isfinite(torch.autograd.grad(output.loss, query)[0]).all()
    ones = torch.ones(4, 6, dtype=torch.float64)
    rows = filled(torch.ones(8, 6, dtype=torch.float64), torch.arange(8) + 50)
    output = pair_loss(pair_of(ones, ones, ones, ones), spec, rows, torch.arange(4), torch.Generator().manual_seed(0))
    assert close(output.loss, output.metrics["chance"])


def slow_redundancy(pairs: Any) -> Any:
    on, off = [], []
    for z, key in pairs:
        for a in range(z.shape[1]):
            for b in range(z.shape[1]):
                correlation = reference.cosine(key[:, a], z[:, b])
                (on if a == b else off).append((correlation - float(a == b)) ** 2)
    return (torch.sqrt(sum(on) / len(on)) + torch.sqrt(sum(off) / len(off))) / 2


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 9999), count=st.integers(2, 6), width=st.integers(2, 5))
def test_redundancy_equals_loops(seed: int, count: int, width: int) -> None:
    z1, z2, k1, k2 = random_vectors(seed, *[(count, width)] * 4)
    z1.requires_grad_()
    pairs = [(z1, k2), (z2, k1)]
    loss, slow = redundancy_loss(pairs), slow_redundancy(pairs)
    assert close(loss, slow)
    assert close(*(torch.autograd.grad(x, z1)[0] for x in (loss, slow)))


def test_no_redundancy_has_no_term_and_a_gradient_of_numbers() -> None:
    z = torch.eye(4, dtype=torch.float64).requires_grad_()
    loss = redundancy_loss([(z, z.detach())])
    loss.backward()
    assert close(loss, 0.0)
    assert torch.isfinite(z.grad).all()


def test_the_redundancy_term_is_added_to_the_loss() -> None:
    projection, query, key = random_vectors(5, *[(2, 6, 5)] * 3)
    projection.requires_grad_()
    embeddings, bank = Embeddings(projection, query, key), filled(random_vectors(8, (20, 5))[0])
    plain = batch_loss(embeddings, without_pnsm(), bank)
    with_term = batch_loss(embeddings, without_pnsm(loss={"redundancy_weight": 2.0}), bank)
    term = slow_redundancy([(projection[0], key[1]), (projection[1], key[0])])
    assert close(with_term.loss, plain.loss + 2 * term)
    assert close(with_term.metrics["redundancy"], term)
    assert with_term.metrics.keys() - plain.metrics.keys() == {"redundancy"}
    assert close(*(torch.autograd.grad(x, projection, retain_graph=True)[0] for x in (with_term.loss, 2 * term)))


def test_directions_are_all_ordered_pairs() -> None:
    assert directions(2) == [(0, 1), (1, 0)]
    assert directions(2, symmetric=False) == [(0, 1)]
    assert directions(3, symmetric=False) == [(0, 1), (0, 2)]
    assert sorted(directions(4)) == sorted(permutations(range(4), 2))


@pytest.mark.parametrize("name", METHODS)
def test_the_loss_of_three_views_is_the_mean_over_their_pairs(name: str) -> None:
    # The mean over three views is another than over two.
    spec = get_method(name, positives=get_method(name).positives.without_draws(), bank={"keys": "view"})
    spec = spec.override({"sampler": "none"}) if spec.objective.uses_negatives else spec
    spec = spec.override({"negatives": {"num_mix": 0, "num_mix_query": 0}}) if name == "mochi" else spec
    projection, query, key = random_vectors(2, *[(3, 6, 5)] * 3)
    bank = filled(random_vectors(8, (20, 5))[0])
    three = batch_loss(Embeddings(projection, query, key), spec, bank, torch.arange(6)).loss
    pairs = [
        batch_loss(Embeddings(*(x[[a, b]] for x in (projection, query, key))), spec, bank, torch.arange(6)).loss
        for a, b in ((0, 1), (0, 2), (1, 2))
    ]
    assert close(three, sum(pairs) / 3)
    assert len(list(view_pairs(Embeddings(projection, query, key)))) == 6


def test_the_keys_of_a_view_are_searched_once_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever number of directions asks for them: two searches for two views that must agree, three for three."""
    searches = []
    search = MemoryBank.search

    def counting(self: MemoryBank, *given: Any) -> Any:
        searches.append(1)
        return search(self, *given)

    monkeypatch.setattr(MemoryBank, "search", counting)
    bank = filled(random_vectors(8, (20, 5))[0])
    for views, positives in ((2, {}), (2, {"agree": True}), (3, {"agree": True})):
        searches.clear()
        batch_loss(Embeddings(*random_vectors(2, *[(views, 6, 5)] * 3)), without_pnsm(positives=positives), bank)
        assert len(searches) == views


@pytest.mark.parametrize("views", [2, 4])
def test_the_mean_of_an_image_s_keys_is_searched_with_once_a_step(views: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All directions are given the rows that loops find nearest to it."""
    mined, search = [], MemoryBank.search

    def watched(self: MemoryBank, *given: Any) -> Any:
        mined.append(search(self, *given))
        return mined[-1]

    monkeypatch.setattr(MemoryBank, "search", watched)
    rows = random_vectors(8, (20, 5))[0]
    embeddings = Embeddings(*random_vectors(2, *[(views, 6, 5)] * 3))
    batch_loss(embeddings, without_pnsm(bank={"keys": "mean"}), filled(rows), torch.arange(6))
    (found,) = mined
    unit = embeddings.key / embeddings.key.norm(dim=-1, keepdim=True)
    for image in range(6):
        assert found.ids[image].tolist() == reference.nearest(unit[:, image].sum(0), rows, 5, torch.arange(20), image)
    same = Embeddings(*(x[:1].expand(views, 6, 5) for x in embeddings))
    by_mean, by_view = (
        batch_loss(same, without_pnsm(bank={"keys": keys}), filled(rows)).loss for keys in ("mean", "view")
    )
    assert close(by_mean, by_view, 1e-12)


def scale_inputs() -> Any:
    embeddings = Embeddings(*random_vectors(4, *[(2, 6, 5)] * 3))
    return embeddings, filled(random_vectors(8, (20, 5))[0])


def test_the_sum_of_directions_is_twice_their_mean() -> None:
    embeddings, bank = scale_inputs()
    mean, total = (batch_loss(embeddings, without_pnsm(loss={"reduction": how}), bank) for how in ("mean", "sum"))
    assert total.loss == 2 * mean.loss
    assert total.metrics["chance"] == 2 * mean.metrics["chance"]
    assert total.metrics["mined_similarity"] == mean.metrics["mined_similarity"]
    one = [
        batch_loss(embeddings, without_pnsm(loss={"reduction": how, "symmetric": False}), bank).loss
        for how in ("mean", "sum")
    ]
    assert one[0] == one[1]


@pytest.mark.parametrize("weights", ["V0", "V1", "V2", "V3", "V4"])
@pytest.mark.parametrize("hard", [0.0, 1.0, 5.0])
def test_weights_sum_as_asked(weights: str, hard: float) -> None:
    """The loss is divided by the weights that it has: those of L_soft in the mean over queries, and lambda."""
    query, projection, key, other, bank = inputs(2)
    pair, rows = pair_of(query, key, projection, other), filled(bank)
    given = {"positives": {"weights": weights, "k": 3}}
    plain, scaled = (
        pair_loss(pair, without_pnsm(loss={"hard_weight": hard, "weight_sum": total}, **given), rows)
        for total in (0.0, 1.0)
    )
    normal = [
        reference.cosine(projection[i], rows.rows[j]) for i in range(5) for j in reference.nearest(key[i], bank, 3)
    ]
    total = (
        sum(sum(reference.soft_weights([float(s) for s in normal[i : i + 3]], weights)) for i in range(0, 15, 3)) / 5
    )
    assert close(scaled.loss, plain.loss / (1 + total + hard))
    assert close(scaled.metrics["chance"], plain.metrics["chance"] / (1 + total + hard))


def test_psm_has_a_sum_of_three_once_its_bank_can_serve() -> None:
    embeddings, bank = scale_inputs()
    plain, three = (batch_loss(embeddings, without_pnsm(loss={"weight_sum": x}), bank).loss for x in (0.0, 3.0))
    assert close(plain, three)
    empty = MemoryBank(20, 5).double()
    plain, three = (batch_loss(embeddings, without_pnsm(loss={"weight_sum": x}), empty).loss for x in (0.0, 3.0))
    assert close(plain * 1.5, three)
    control = without_pnsm(positives={"k": 0}, loss={"weight_sum": 3.0})  # the control at equal weight
    assert close(batch_loss(embeddings, control, bank).loss, three)
    byol = [batch_loss(embeddings, get_method("byol", loss={"weight_sum": x})).loss for x in (0.0, 2.0)]
    assert close(2 * byol[0], byol[1])


def test_the_hardest_of_mochi_as_a_share_of_the_bank() -> None:
    embeddings, bank = scale_inputs()
    spec = get_method("mochi", negatives={"num_hard": 5, "num_mix": 8, "num_mix_query": 3})
    share = get_method("mochi", negatives={"hard_share": 0.25, "num_mix": 8, "num_mix_query": 3})
    draws = (torch.Generator().manual_seed(1) for _ in range(2))
    losses = [batch_loss(embeddings, s, bank, None, d).loss for s, d in zip((spec, share), draws, strict=True)]
    assert losses[0] == losses[1]
    assert get_method("mochi", negatives={"hard_share": 1 / 64}).negatives.num_hardest(4096) == 64
    assert get_method("mochi").negatives.num_hardest(4096) == 1024


@pytest.mark.parametrize("kept", ["all", "some", "none"])
@pytest.mark.parametrize("temperature", [0.5, 0.01])
def test_an_accelerators_log_softmax_is_the_contrastive_loss(kept: str, temperature: float) -> None:
    """Value and gradient, with positives that do not exist, with all negatives dropped and at a small temperature."""
    positives, negatives = random_vectors(3, (6, 4), (6, 9))
    logits, others = ((x / temperature).requires_grad_() for x in (positives, negatives))
    mask = torch.arange(4) < torch.tensor([4, 1, 2, 4, 3, 1])[:, None]
    weights = torch.rand(6, 4, generator=torch.Generator().manual_seed(0), dtype=logits.dtype)
    keep = {"all": None, "some": negatives > 0, "none": torch.zeros(6, 9, dtype=torch.bool)}[kept]
    fast = joined_contrastive_loss(logits, weights, mask, others, keep).sum()
    slow = contrastive_loss(logits, weights, mask, masked_logsumexp(others, keep)).sum()
    assert close(fast, slow)
    for a, b in zip(
        torch.autograd.grad(fast, [logits, others]), torch.autograd.grad(slow, [logits, others]), strict=True
    ):
        assert torch.isfinite(a).all()
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("views", [2, 3])
def test_one_search_for_all_directions_finds_what_one_for_each_finds(views: int) -> None:
    bank = filled(random_vectors(1, (30, 4))[0])
    keys, ids = random_vectors(2, (views, 5, 4))[0], torch.arange(5)
    pairs = tuple(directions(views))
    single = [MiningBatch(keys[a], keys[b], keys[a], keys[a], ids, bank, directions=((a, b),)) for a, b in pairs]
    vectors = [torch.cat([batch[field] for batch in single]) for field in range(4)]
    joined = MiningBatch(*vectors, ids.repeat(len(pairs)), bank, directions=pairs, searches={})
    for query_view in (False, True):
        for field, column in enumerate(joined.search("test", 3, query_view)):
            expected = torch.cat([batch.search("test", 3, query_view)[field] for batch in single])
            torch.testing.assert_close(column, expected)
    assert joined.searches is not None
    assert set(joined.searches) == {(view, 3) for view in range(views)}, "each view is searched for once"
