"""All methods: golden vectors, slow references, identities, odd corners, and compositions by key."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import normalize

import psm
import reference
from helpers import batch_loss, close, filled, golden, pair_loss, pair_of, random_vectors
from helpers import method as spec_of
from psm.losses.negative_weighting import WEIGHTINGS, bayesian_weights
from psm.methods import METHODS, get_method
from psm.mining.memory_bank import MemoryBank
from psm.mining.mochi import mix_negatives
from psm.mining.negatives import bank_negatives
from psm.models.outputs import Embeddings
from psm.training.module import PretrainModule
from psm.utils.errors import UserError

ALL = list(METHODS)
IN_BATCH = ("simclr", "dcl", "hcl", "bcl")


def embeddings(seed: Any = 0, count: Any = 6, width: Any = 5, dtype: Any = torch.float64) -> Any:
    """Of networks where queries, keys and projections differ."""
    projection, query, key = random_vectors(seed, *[(2, count, width)] * 3, dtype=dtype)
    return Embeddings(projection, query.requires_grad_(), key)


def alike(z1: Any, z2: Any) -> Any:
    """Of one network without a predictor."""
    z = torch.stack([z1, z2])
    return Embeddings(z, z, z)


@pytest.mark.parametrize("method", IN_BATCH)
def test_golden_in_batch(method: str) -> None:
    g = golden("in_batch")
    z1, z2 = (g[name].clone().requires_grad_() for name in ("z1", "z2"))
    loss = batch_loss(alike(z1, z2), spec_of(method)).loss
    gradients = torch.autograd.grad(loss, (z1, z2))
    assert close(loss, g[f"{method}_loss"])
    assert close(gradients[0], g[f"{method}_dz1"])
    assert close(gradients[1], g[f"{method}_dz2"])


def test_golden_moco() -> None:
    g = golden("moco")
    query = g["query"].clone().requires_grad_()
    pair = pair_of(query, g["key"], query, g["key"])
    loss = pair_loss(pair, spec_of("mocov2"), filled(g["queue"])).loss
    assert close(loss, g["loss"])
    assert close(torch.autograd.grad(loss, query)[0], g["dquery"])


def test_golden_byol() -> None:
    g = golden("byol")
    query = g["prediction"].clone().requires_grad_()
    loss = pair_loss(pair_of(query, g["target"], query, g["target"]), spec_of("byol")).loss
    assert close(loss, g["loss"])
    assert close(torch.autograd.grad(loss, query)[0], g["dprediction"])


def test_golden_nnclr() -> None:
    g = golden("nnclr")
    query = g["prediction"].clone().requires_grad_()
    loss = pair_loss(pair_of(query, g["z"], query, g["z"]), spec_of("nnclr"), filled(g["bank"])).loss
    assert close(loss, g["loss"])
    assert close(torch.autograd.grad(loss, query)[0], g["dprediction"])


def test_golden_vicreg() -> None:
    g = golden("vicreg")
    z1, z2 = (g[name].clone().requires_grad_() for name in ("z1", "z2"))
    loss = batch_loss(alike(z1, z2), spec_of("vicreg")).loss
    gradients = torch.autograd.grad(loss, (z1, z2))
    assert close(loss, g["loss"])
    assert close(gradients[0], g["dz1"])
    assert close(gradients[1], g["dz2"])


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 9999),
    count=st.integers(2, 5),
    width=st.integers(2, 6),
    temperature=st.sampled_from([0.1, 0.5, 1.0]),
    tau=st.sampled_from([0.0, 0.05, 0.3]),
    beta=st.sampled_from([0.0, 0.5, 1.0]),
    alpha=st.sampled_from([0.5, 0.7, 0.9]),
)
def test_in_batch_methods_equal_loops(
    seed: int, count: Any, width: Any, temperature: Any, tau: Any, beta: Any, alpha: Any
) -> None:
    z1, z2 = (x.requires_grad_() for x in random_vectors(seed, *[(count, width)] * 2))
    slow_masses = {
        "simclr": reference.sum_mass,
        "dcl": reference.debiased_mass(temperature, tau),
        "hcl": reference.hard_mass(temperature, tau, beta),
        "bcl": reference.bayesian_mass(tau, alpha, beta),
    }
    for method, mass in slow_masses.items():
        given = {"tau": tau, "beta": beta, "alpha": alpha}
        known = spec_of(method).weighting.settings()
        wanted = spec_of(
            method, loss={"temperature": temperature}, weighting={k: v for k, v in given.items() if k in known}
        )
        loss = batch_loss(alike(z1, z2), wanted).loss
        slow = reference.in_batch_loss(z1, z2, temperature, mass)
        assert close(loss, slow, 1e-8), method
        for a, b in zip(*(torch.autograd.grad(x, (z1, z2)) for x in (loss, slow)), strict=True):
            assert close(a, b, 1e-7), method


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 9999), count=st.integers(2, 5), width=st.integers(2, 6), rows=st.integers(1, 9))
def test_other_methods_equal_loops(seed: int, count: Any, width: Any, rows: Any) -> None:
    query, key, bank = random_vectors(seed, (count, width), (count, width), (rows, width))
    query.requires_grad_()
    for method, slow in (
        ("mocov2", reference.bank_loss(query, key, bank, 0.5)),
        ("nnclr", reference.nearest_loss(query, key, bank, 0.5)),
    ):
        loss = pair_loss(pair_of(query, key, query, key), spec_of(method), filled(bank)).loss
        assert close(loss, slow), method
        assert close(*(torch.autograd.grad(x, query)[0] for x in (loss, slow))), method
    z1, z2 = random_vectors(seed + 1, *[(count, width)] * 2)
    assert close(batch_loss(alike(z1, z2), spec_of("vicreg")).loss, reference.vicreg_loss(z1, z2), 1e-8)


def test_mixed_negatives_equal_vectors() -> None:
    """The similarities of MoCHi's synthetic negatives, and their gradients, are those of the vectors made outright."""
    query, rows = random_vectors(4, (3, 6), (20, 6))
    query = normalize(query, dim=1).requires_grad_()
    bank = filled(rows)
    plain = bank_negatives(query, bank)
    generator = torch.Generator().manual_seed(1)
    fast, _ = mix_negatives(query, bank, plain.similarity, plain.mask, 8, 5, 4, generator)
    assert torch.equal(fast[:, :20], plain.similarity)
    draws = torch.Generator().manual_seed(1)
    hardest = plain.similarity.topk(8, dim=1).indices
    chosen = [hardest.gather(1, (torch.rand(3, n, generator=draws) * 8).long()) for n in (5, 5, 4)]
    x, y = torch.rand(3, 5, generator=draws).double(), 0.5 * torch.rand(3, 4, generator=draws).double()
    first, second, third = (bank.rows[places] for places in chosen)
    pairs = normalize(x[..., None] * first + (1 - x[..., None]) * second, dim=2)
    with_query = normalize(y[..., None] * query.detach()[:, None] + (1 - y[..., None]) * third, dim=2)
    slow = torch.einsum("nd,nsd->ns", query, torch.cat([pairs, with_query], 1))
    assert close(fast[:, 20:], slow)
    weights = torch.arange(27.0).view(3, 9).double()
    gradients = [torch.autograd.grad((s * weights).sum(), query)[0] for s in (fast[:, 20:], slow)]
    assert close(*gradients)


def same_loss(a: Any, b: Any, tolerance: Any = 1e-9, one_network: Any = False) -> Any:
    e = embeddings()
    if one_network:
        e = alike(*random_vectors(3, (6, 5), (6, 5)))
    bank = filled(random_vectors(8, (20, 5))[0])
    draws = torch.Generator().manual_seed(0)
    return close(batch_loss(e, a, bank, None, draws).loss, batch_loss(e, b, bank).loss, tolerance)


def test_identities() -> None:
    assert same_loss(spec_of("dcl", weighting={"tau": 0.0}), spec_of("simclr"), one_network=True)
    assert same_loss(spec_of("hcl", weighting={"beta": 0.0}), spec_of("dcl"), one_network=True)
    halves = spec_of("bcl", weighting={"alpha": 0.5, "beta": 0.5})
    assert same_loss(halves, spec_of("simclr"), 1e-2, one_network=True)
    assert same_loss(spec_of("mochi", negatives={"num_mix": 0, "num_mix_query": 0}), spec_of("mocov2"))
    assert same_loss(spec_of("psm", sampler="none", loss={"hard_weight": 0.0}), spec_of("snclr"))
    assert same_loss(spec_of("mocov2", sampler={"name": "pnsm", "a": 0.0}), spec_of("mocov2"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [0.01, 0.5])
@pytest.mark.parametrize("case", ["random", "identical", "opposite", "all dropped", "empty bank"])
@pytest.mark.parametrize("method", ALL)
def test_finite_value_and_gradient(method: str, case: Any, temperature: Any, dtype: torch.dtype) -> None:
    projection, query, key = random_vectors(3, *[(2, 4, 6)] * 3, dtype=torch.float32)
    if case == "identical":
        projection = query = key = torch.ones(2, 4, 6)
    elif case == "opposite":
        key = -query.flip(0)
    query = query.to(dtype).requires_grad_()
    spec = get_method(method)
    own = spec.predictor.enabled or spec.target.enabled
    e = Embeddings(projection.to(dtype), query, key.to(dtype)) if own else Embeddings(query, query, query)
    dropping = (
        {"sampler": {"name": "pnsm", "a": 1e9}} if case == "all dropped" and spec.objective.uses_negatives else {}
    )
    wanted = spec_of(method, loss={"temperature": temperature}, **dropping)
    bank = MemoryBank(wanted.bank.size, 6)
    if case != "empty bank":
        bank.enqueue(torch.randn(30, 6), torch.arange(30) + 100)
    outcome = batch_loss(e, wanted, bank, torch.arange(4), torch.Generator().manual_seed(0))
    outcome.loss.backward()
    assert torch.isfinite(outcome.loss)
    assert torch.isfinite(query.grad).all()
    assert set(outcome.metrics) == set(wanted.metric_names)
    assert bool(outcome.metrics) == (method not in ("byol", "vicreg"))
    assert all(torch.isfinite(fact) for fact in outcome.metrics.values())


@pytest.mark.parametrize("weighting", ["sum", "debiased", "hard", "bayesian"])
def test_nothing_kept_weighs_nothing(weighting: Any) -> None:
    logits = torch.randn(2, 4, requires_grad=True)
    keep = torch.tensor([[True] * 4, [False] * 4])
    value = WEIGHTINGS.build(weighting)(logits, keep, torch.zeros(2), 0.5)
    assert value[1] == -torch.inf
    value.exp().sum().backward()
    assert torch.isfinite(logits.grad).all()
    assert (logits.grad[0] != 0).any()


def test_ranks_leave_out_what_was_dropped() -> None:
    logits = torch.randn(1, 10, dtype=torch.float64)
    keep = torch.arange(10) % 3 != 0
    every = torch.ones(1, int(keep.sum()), dtype=torch.bool)
    all_of_them = bayesian_weights(logits[:, keep], every, 0.1, 0.9, 0.9)
    assert close(bayesian_weights(logits, keep[None], 0.1, 0.9, 0.9)[:, keep], all_of_them)


# One of each kind of positives, negatives, weighting and objective; the others differ from these in one part.
OFTEN = ("psm", "byol", "vicreg", "mochi", "nnclr", "bcl")


@pytest.mark.parametrize(
    "method", [pytest.param(name, marks=() if name in OFTEN else pytest.mark.slow) for name in ALL]
)
def test_every_method_trains_resumes_exactly_and_evaluates(
    tmp_path: Path, small: dict[str, Any], monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    small |= {"method": method, "save": {"every_steps": 1}, "monitor": {"knn": False}}
    whole = psm.pretrain(tmp_path / "whole", **small)
    assert set(get_method(method).metric_names) <= whole.metrics[0].keys()
    assert psm.evaluate(whole.out, linear={"epochs": 1}, progress=False)[0].of == method
    step = PretrainModule.training_step

    def stopping(self: Any, batch: Any, index: Any) -> Any:
        if batch.step == 4:
            raise InterruptedError
        return step(self, batch, index)

    monkeypatch.setattr(PretrainModule, "training_step", stopping)
    with pytest.raises(InterruptedError):
        psm.pretrain(tmp_path / "parts", **small)
    monkeypatch.undo()
    parts = psm.pretrain(tmp_path / "parts", resume=True)
    for name, value in whole.encoder.state_dict().items():
        assert torch.equal(value, parts.encoder.state_dict()[name])


@pytest.mark.parametrize(
    ("method", "keys"),
    [
        ("simclr", {"sampler": "pnsm"}),
        ("mocov2", {"sampler": {"name": "pnsm", "a": 2.0}}),
        ("hcl", {"sampler": "pnsm"}),
        ("nnclr", {"weighting": "bayesian"}),
        ("psm", {"weighting": "hard"}),
        ("simclr", {"positives": {"rule": "knn", "k": 2}}),
        ("byol", {"positives": {"rule": "knn", "k": 2}}),
        ("psm", {"negatives": "bank", "loss": {"symmetric": False}}),
        ("mochi", {"bank": {"allow_self": False}, "sampler": "pnsm"}),
    ],
)
def test_parts_exchanged_by_key(method: str, keys: Any) -> None:
    row, exchanged = get_method(method), get_method(method, **keys)
    bank = filled(random_vectors(8, (20, 5))[0])
    losses = [
        batch_loss(embeddings(), spec, bank, torch.arange(6), torch.Generator().manual_seed(0)).loss
        for spec in (row, exchanged)
    ]
    assert torch.isfinite(losses[1])
    assert losses[0] != losses[1]


@pytest.mark.parametrize(
    ("method", "keys", "says"),
    [
        ("byol", {"sampler": "pnsm"}, "no negatives"),
        ("byol", {"negatives": "views"}, "no negatives"),
        ("byol", {"weighting": "hard"}, "no negatives"),
        ("byol", {"loss": {"hard_weight": 1.0}}, "contrastive term"),
        ("byol", {"target": {"enabled": False}, "predictor": {"enabled": False}}, "collapses"),
        ("vicreg", {"target": {"enabled": True}}, "one network"),
        ("vicreg", {"positives": "nn"}, "no place"),
        ("simclr", {"negatives": "none"}, "nothing to contrast"),
        ("simclr", {"negatives": {"num_mix": 5}}, "mochi has it"),
        ("nnclr", {"positives": "knn"}, "one positive"),
        ("dcl", {"weighting": {"tau": 1.0}}, "weighting.tau"),
        ("bcl", {"weighting": {"beta": 2.0}}, "weighting.beta"),
        ("mocov2", {"bank": {"index": "faiss"}}, "none are mined"),
        ("vicreg", {"loss": {"redundancy_weight": 1.0}}, "leave it at 0"),
        ("simclr", {"predictor": {"lr_factor": 10.0}}, "give predictor.enabled=true"),
        ("psm", {"predictor": {"enabled": False, "hidden_dim": 64}}, "give predictor.enabled=true"),
        ("simclr", {"target": {"schedule": "cosine"}}, "no target network"),
        ("simclr", {"target": {"views": "weak"}}, "there is none: give target.enabled=true"),
        ("psm", {"positives": {"agree": True}, "bank": {"keys": "mean"}}, "mine the same"),
    ],
)
def test_nonsense_is_refused(method: str, keys: Any, says: str) -> None:
    with pytest.raises(UserError, match=says):
        get_method(method, **keys)
