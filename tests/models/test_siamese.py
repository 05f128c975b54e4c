"""Online and target networks: what each head is given, the directed pairs, the moving average."""

from copy import deepcopy

import pytest
import torch
from torch import nn
from torch.nn.functional import normalize

from psm.models.outputs import view_pairs
from psm.models.siamese import SiameseNetworks


def networks(width: int = 7, hidden: int = 5, out: int = 3, predictor: bool = True) -> SiameseNetworks:
    """Unequal dimensions everywhere, so that no head can be fed another's features."""

    def head(inputs: int, outputs: int) -> nn.Module:
        return nn.Sequential(nn.Linear(inputs, hidden), nn.BatchNorm1d(hidden), nn.ReLU(), nn.Linear(hidden, outputs))

    encoder = nn.Sequential(nn.Flatten(), nn.Linear(3 * 4 * 4, width), nn.BatchNorm1d(width))
    return SiameseNetworks(encoder, head(width, out), head(out, out) if predictor else None)


def views() -> torch.Tensor:
    return torch.randn(2, 6, 3, 4, 4)


def test_each_head_is_given_what_it_should_be() -> None:
    nets, given = networks().eval(), views()
    assert nets.target is not None
    assert nets.predictor is not None
    with torch.no_grad():
        for parameter in nets.target.parameters():
            parameter.add_(0.1)
    embeddings, features = nets(given)
    z = nets.projector(nets.encoder(given.flatten(0, 1)))
    assert torch.equal(embeddings.projection.flatten(0, 1), z)
    assert torch.equal(embeddings.query.flatten(0, 1), nets.predictor(z))
    assert torch.equal(embeddings.key.flatten(0, 1), nets.target(given.flatten(0, 1)))
    assert torch.equal(nets.embed_keys(given[0]), embeddings.key[0])
    assert not embeddings.key.requires_grad
    assert features.shape == (12, 7)


def test_the_target_sees_views_of_its_own_in_chunks_too() -> None:
    nets, given, weak = networks().eval(), views(), views()
    assert nets.target is not None
    same, features = nets(given)
    own, own_features = nets(given, target_views=weak)
    assert torch.equal(own.key.flatten(0, 1), nets.target(weak.flatten(0, 1)))
    assert torch.equal(own.query, same.query)
    assert torch.equal(own.projection, same.projection)
    assert torch.equal(own_features, features)
    chunked, _ = nets(given, 4, weak)
    torch.testing.assert_close(chunked.key, own.key)
    assert torch.equal(nets(given, target_views=given)[0].key, same.key)


def test_pairs_are_directed_and_have_unit_norm() -> None:
    embeddings, _ = networks()(views())
    forth, back = view_pairs(embeddings)
    assert torch.equal(forth.query, normalize(embeddings.query[0], dim=-1))
    assert torch.equal(forth.key, normalize(embeddings.key[1], dim=-1))
    assert torch.equal(forth.projection, normalize(embeddings.projection[0], dim=-1))
    assert torch.equal(forth.query_view_key, normalize(embeddings.key[0], dim=-1))
    assert torch.equal(back.query, normalize(embeddings.query[1], dim=-1))
    assert torch.equal(back.query_view_key, forth.key)
    assert len(list(view_pairs(embeddings, symmetric=False))) == 1


def test_pairs_of_half_precision_are_float32() -> None:
    embeddings, _ = networks()(views())
    (pair,) = view_pairs(type(embeddings)(*(x.bfloat16() for x in embeddings)), symmetric=False)
    assert {x.dtype for x in pair} == {torch.float32}
    assert torch.allclose(pair.query.norm(dim=1), torch.ones(6), atol=1e-6)


def test_the_target_averages_parameters_and_keeps_its_own_statistics() -> None:
    nets = networks()
    assert nets.target is not None
    before = {name: value.clone() for name, value in nets.target.state_dict().items()}
    with torch.no_grad():
        for parameter in nets.encoder.parameters():
            parameter.add_(1.0)
    nets.encoder.get_buffer("2.running_mean").fill_(9.0)
    nets.update_target(0.9)
    online = nn.Sequential(nets.encoder, nets.projector).state_dict()
    for name, value in nets.target.state_dict().items():
        if "running" in name or "num_batches" in name:
            assert torch.equal(value, before[name])
        else:
            assert torch.allclose(value, 0.9 * before[name] + 0.1 * online[name], atol=1e-6)
    nets(views())
    assert nets.target.get_buffer("0.2.num_batches_tracked") == 1
    assert all(not p.requires_grad for p in nets.target.parameters())


def test_keys_have_a_gradient_only_without_target_and_predictor() -> None:
    for predictor in (False, True):
        base = networks(predictor=predictor)
        nets = SiameseNetworks(base.encoder, base.projector, base.predictor, target=False)
        nets.update_target(0.9)  # does nothing
        embeddings, _ = nets(views())
        assert embeddings.key.requires_grad != predictor
        assert torch.equal(embeddings.key, embeddings.projection)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_target_follows_in_half_precision_as_in_float32(dtype: torch.dtype) -> None:
    """An update of 0.4 % of the distance is below the resolution of half precision: alone it would stand still."""
    whole = SiameseNetworks(nn.Linear(6, 8), nn.Linear(8, 4))
    half = deepcopy(whole).to(dtype)
    half.average_in_float32()
    half.to(dtype)  # as Lightning does once more
    for networks in (whole, half):
        for weights in networks.encoder.parameters():
            nn.init.constant_(weights, 1.0)
        for _ in range(500):
            networks.update_target(0.996)
    for expected, found in zip(whole.target.parameters(), half.target.parameters(), strict=True):
        assert found.dtype == dtype
        torch.testing.assert_close(found.float(), expected, atol=0.02, rtol=0.01)
    restored = deepcopy(whole).to(dtype)
    restored.average_in_float32()
    restored.load_state_dict(half.state_dict())
    for networks in (half, restored):
        networks.update_target(0.996)
    assert all(torch.equal(a, b) for a, b in zip(half.target.parameters(), restored.target.parameters(), strict=True))
