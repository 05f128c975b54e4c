"""Fused BN + add + ReLU equals PyTorch's three layers, and runs only where it is supported."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from helpers import compiled, using
from psm.kernels import bn_relu, dispatch
from psm.kernels.dispatch import optimize
from psm.models import factory
from psm.training.distributed import SyncBatchNormCPU


@pytest.fixture(autouse=True)
def any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small maps too, which are quicker to test."""
    monkeypatch.setattr(bn_relu, "MIN_FLOATS", 0)


def maps_of(*shape: Any, seed: Any = 0, far: Any = 0.0) -> Any:
    draws = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=draws) + far).to(memory_format=torch.channels_last).requires_grad_()


def norm_of(channels: Any) -> Any:
    norm = nn.BatchNorm2d(channels)
    nn.init.uniform_(norm.weight, -1, 1)
    nn.init.normal_(norm.bias)
    return norm


def passes(norm: Any, maps: Any, plus: Any, near: Any = 0.0) -> Any:
    """Value, gradients and running moments.

    Values ``near`` zero weigh nothing: rounding may put them on either side of it, and their gradient with them.
    """
    with optimize(norm):
        out = dispatch.bn_add_relu(norm, maps, plus)
    exact = functional.batch_norm(
        maps.double(), None, None, norm.weight.double(), norm.bias.double(), True, eps=norm.eps
    )
    exact = exact if plus is None else exact + plus.double()
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(7)).to(out.dtype)
    weights = weights.masked_fill(exact.detach().abs() < near, 0)
    given = [maps, *norm.parameters(), *([] if plus is None else [plus])]
    gradients = torch.autograd.grad((out * weights).sum(), given)
    return out.detach(), *gradients, norm.running_mean, norm.running_var, norm.num_batches_tracked


@compiled
@settings(deadline=None)
@given(
    batch=st.integers(1, 30),
    side=st.integers(2, 9),
    channels=st.sampled_from([32, 64, 96, 512]),
    summed=st.booleans(),
    far=st.sampled_from([0.0, 1.0, 1000.0]),
)
def test_values_gradients_and_running_moments_equal_torch_s(
    batch: Any, side: Any, channels: Any, summed: Any, far: Any
) -> None:
    maps = maps_of(batch, channels, side, side, far=far)
    plus = maps_of(batch, channels, side, side, seed=1) if summed else None
    norm = norm_of(channels)
    doubles = [None if x is None else x.detach().double().requires_grad_() for x in (maps, plus)]
    near = 1e-5 * max(1.0, far)
    exact = passes(deepcopy(norm).double(), *doubles, near)  # torch's: only single precision has another way
    assert bn_relu.supports(norm, maps, plus)
    found = passes(norm, maps, plus, near)
    for fast, true in zip(found, exact, strict=True):
        assert (fast - true).abs().max() <= 1e-4 * max(1.0, far) * true.abs().max()


@compiled
def test_it_errs_less_than_torch() -> None:
    """Far from zero, where a single pass in single precision would lose most."""
    maps, norm = maps_of(64, 32, 16, 16, far=100.0), norm_of(32)
    with torch.no_grad():
        true = functional.relu(deepcopy(norm).double()(maps.double()))
        torchs = functional.relu(deepcopy(norm)(maps))
        found = bn_relu.bn_add_relu(norm, maps)
    assert (found - true).abs().max() <= max((torchs - true).abs().max(), 1e-5)


@compiled
@pytest.mark.parametrize("summed", [False, True])
def test_what_is_no_number_shows_as_in_torch(summed: Any) -> None:
    norm, plus = norm_of(32), torch.zeros(4, 32, 4, 4) if summed else None
    plus = plus if plus is None else plus.contiguous(memory_format=torch.channels_last)
    for value in (float("nan"), float("inf"), -float("inf")):
        with torch.no_grad():
            maps = maps_of(4, 32, 4, 4).detach()
            maps[1, 3, 2, 2] = value
            expected = functional.relu(deepcopy(norm)(maps))
            assert torch.equal(bn_relu.bn_add_relu(norm, maps, plus).isnan(), expected.isnan())
    if summed:
        with torch.no_grad():
            plus[0, 0, 0, 0], plus[0, 1, 0, 0] = -float("inf"), float("nan")
            found = bn_relu.bn_add_relu(norm, maps_of(4, 32, 4, 4).detach(), plus)
        assert found[0, 0, 0, 0] == 0
        assert found[0, 1, 0, 0].isnan()


@compiled
def test_the_gradient_can_be_taken_twice() -> None:
    maps, norm = maps_of(8, 32, 4, 4), norm_of(32)
    out = bn_relu.bn_add_relu(norm, maps)
    first, second = (torch.autograd.grad(out.sum(), (maps, norm.weight), retain_graph=True) for _ in range(2))
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))


@compiled
def test_it_is_the_same_each_time_and_for_any_number_of_threads() -> None:
    """Bit for bit: pieces are summed in their order, whoever comes first."""
    norm, maps = norm_of(32), maps_of(64, 32, 16, 16)
    found = []
    for threads in (1, 2, 2, 2, 3):
        with using(threads):
            found.append(passes(deepcopy(norm), maps, None))
    assert all(torch.equal(x, y) for again in found[1:] for x, y in zip(again, found[0], strict=True))


def without_bias() -> Any:
    norm = nn.BatchNorm2d(32)
    norm.bias = None
    return norm


def eval_norm() -> Any:
    return nn.BatchNorm2d(32).eval()


@compiled
@pytest.mark.parametrize(
    ("norm", "maps"),
    [
        (eval_norm(), maps_of(8, 32, 4, 4)),
        (nn.BatchNorm2d(32, affine=False), maps_of(8, 32, 4, 4)),
        (without_bias(), maps_of(8, 32, 4, 4)),
        (nn.BatchNorm2d(32, momentum=None), maps_of(8, 32, 4, 4)),
        (nn.BatchNorm2d(32, track_running_stats=False), maps_of(8, 32, 4, 4)),
        (nn.BatchNorm2d(24), maps_of(8, 24, 4, 4)),
        (nn.BatchNorm2d(32), torch.randn(8, 32, 4, 4)),  # channels first
        (nn.BatchNorm2d(32), maps_of(8, 64, 4, 4)),
        (nn.BatchNorm2d(64), maps_of(8, 32, 4, 4)),
        (nn.BatchNorm2d(32).double(), maps_of(8, 32, 4, 4).detach().double()),
        (nn.GroupNorm(4, 32), maps_of(8, 32, 4, 4)),
        (SyncBatchNormCPU(32), maps_of(8, 32, 4, 4)),
    ],
)
def test_any_other_norm_is_left_alone(norm: Any, maps: Any) -> None:
    assert not bn_relu.supports(norm, maps, None)


@compiled
def test_outside_the_context_it_is_torch_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bn_relu, "bn_add_relu", None)
    norm, maps = norm_of(32), maps_of(8, 32, 4, 4)
    with torch.no_grad():
        assert torch.equal(dispatch.bn_add_relu(deepcopy(norm), maps), functional.relu(norm(maps)))


@compiled
def test_small_maps_are_torch_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bn_relu, "MIN_FLOATS", 2**20)
    assert not bn_relu.supports(norm_of(32), maps_of(8, 32, 4, 4), None)
    assert bn_relu.supports(norm_of(32), torch.empty(512, 32, 16, 16, memory_format=torch.channels_last), None)


@compiled
def test_a_network_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    taken, plain = [], bn_relu.bn_add_relu
    monkeypatch.setattr(bn_relu, "bn_add_relu", lambda *given: taken.append(given[2] is not None) or plain(*given))
    monkeypatch.setattr(dispatch, "can_fuse_block", lambda *given: False)  # layer by layer
    network = factory.create_encoder("tiny", "cifar", 32).to(memory_format=torch.channels_last)
    with optimize(network):
        network(maps_of(8, 3, 32, 32).detach())
    assert taken == [False, *[False, True] * 4]  # the stem, and two in each of four blocks
