"""Matrix products by the native kernel equal PyTorch's in value and gradient, and it runs only where supported."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from helpers import compiled, using
from psm.kernels import plane_gemm, runtime
from psm.kernels.dispatch import optimize
from psm.kernels.plane_gemm import PlaneProducts


@pytest.fixture
def everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """On CPUs of other widths and of Intel too, and for small matrices."""
    monkeypatch.setattr(plane_gemm, "WIDTH", runtime.simd_width())
    monkeypatch.setattr(plane_gemm, "MIN_PRODUCTS", 0)
    monkeypatch.setattr(plane_gemm, "mkl_has_avx512", lambda: False)


def numbers(*shape: int, seed: int = 0) -> Any:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def gradients(function: Any, out_seed: int, *given: Any) -> Any:
    """Value of a function and the gradients of what is given."""
    leaves = [each.clone().requires_grad_() for each in given]
    out = function(*leaves)
    out.backward(numbers(*out.shape, seed=out_seed).to(out))
    return [out.detach(), *(leaf.grad for leaf in leaves)]


@compiled
@settings(deadline=None)
@given(
    batch=st.integers(1, 45),
    planes=st.integers(1, 5),
    channels=st.sampled_from([32, 64, 288]),
    columns=st.sampled_from([32, 96]),
    transposed=st.booleans(),
    threads=st.integers(1, 3),
)
def test_value_and_gradients_equal_the_products(
    batch: int, planes: int, channels: int, columns: int, transposed: bool, threads: int
) -> None:
    """Of any number of rows, more inner channels than are packed at a time, and weights either way round."""
    inputs, weights = numbers(batch, planes, channels), numbers(planes, channels, columns, seed=1)
    weights = weights.transpose(1, 2).contiguous().transpose(1, 2) if transposed else weights
    with using(threads):
        found = gradients(PlaneProducts.apply, 2, inputs, weights)
    exact = gradients(lambda x, w: torch.einsum("npc,pco->npo", x, w), 2, inputs.double(), weights.double())
    for one, other in zip(found, exact, strict=True):
        torch.testing.assert_close(one.double(), other, atol=1e-4, rtol=1e-5)


@compiled
def test_more_rows_than_a_part_has() -> None:
    inputs, weights = numbers(801, 2, 32), numbers(2, 32, 64, seed=1)
    exact = torch.einsum("npc,pco->npo", inputs.double(), weights.double())
    torch.testing.assert_close(PlaneProducts.apply(inputs, weights).double(), exact, atol=1e-4, rtol=1e-5)


@compiled
def test_threads_change_no_bit() -> None:
    inputs, weights, found = numbers(50, 3, 320), numbers(3, 320, 64, seed=1), []
    for threads in (1, 2, 3):
        with using(threads):
            found.append(gradients(PlaneProducts.apply, 2, inputs, weights))
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))


@compiled
def test_gradients_of_gradients_are_those_of_the_products() -> None:
    found = []
    for function in (PlaneProducts.apply, plane_gemm._plain):
        inputs, weights = (0.1 * each for each in (numbers(4, 2, 32), numbers(2, 32, 32, seed=1)))
        inputs, weights = inputs.requires_grad_(), weights.requires_grad_()
        (slope,) = torch.autograd.grad(function(inputs, weights).pow(3).sum(), inputs, create_graph=True)
        found.append(torch.autograd.grad(slope.square().sum(), (inputs, weights)))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@compiled
@pytest.mark.usefixtures("everywhere")
@pytest.mark.parametrize("shape", [(7, 64), (2, 5, 64), (64,)])
@pytest.mark.parametrize("biased", [True, False])
def test_a_linear_layer_equals_pytorchs(shape: Any, biased: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, taken = nn.Linear(64, 96, bias=biased), []
    plain = plane_gemm._launch
    monkeypatch.setattr(plane_gemm, "_launch", lambda *given: taken.append(given) or plain(*given))
    weights = [layer.weight.detach(), *([layer.bias.detach()] if biased else [])]
    with optimize(layer):
        found = gradients(functional.linear, 2, numbers(*shape), *weights)
    assert len(taken) == (3 if len(shape) > 1 else 0)
    expected = gradients(functional.linear, 2, numbers(*shape), *weights)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
        assert one.stride() == other.stride()


@compiled
@pytest.mark.usefixtures("everywhere")
def test_a_product_with_constants_needs_no_wide_rows() -> None:
    """The transform of a weight: 9 taps, which are no multiple of a vector, times many columns."""
    constants, weight = numbers(81, 9), numbers(9, 160, seed=1).requires_grad_()
    assert plane_gemm.supports(constants[:, None], weight[None])
    out = plane_gemm.matmul(constants, weight)
    out.backward(torch.ones_like(out))
    torch.testing.assert_close(out, constants @ weight)
    torch.testing.assert_close(weight.grad, constants.T @ torch.ones_like(out))
    assert not plane_gemm.supports(constants.requires_grad_()[:, None], weight[None])


@compiled
@pytest.mark.usefixtures("everywhere")
def test_what_is_not_supported_goes_to_pytorch() -> None:
    inputs, weights = numbers(16, 2, 64), numbers(2, 64, 64)
    assert plane_gemm.supports(inputs, weights)
    assert not plane_gemm.supports(inputs.double(), weights.double())
    assert not plane_gemm.supports(inputs.to("meta"), weights.to("meta"))
    assert not plane_gemm.supports(inputs, weights[..., :40])
    assert not plane_gemm.supports(inputs[..., :40], weights[:, :40].transpose(1, 2).contiguous().transpose(1, 2))
    assert not plane_gemm.supports(inputs, weights[:1])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not plane_gemm.supports(inputs, weights)
    for kind in (torch.double, torch.float):
        out = plane_gemm.plane_products(inputs.to(kind), weights[..., :40].to(kind))
        expected = torch.einsum("npc,pco->npo", inputs.to(kind), weights[..., :40].to(kind))
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)


def test_intels_cpus_keep_mkl(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, weights = numbers(128, 4, 64), numbers(4, 64, 64)
    monkeypatch.setattr(plane_gemm, "mkl_has_avx512", lambda: True)
    assert not plane_gemm.supports(inputs, weights)


@compiled
def test_sizes_that_do_not_fit_are_refused() -> None:
    inputs, weights = numbers(4, 1, 32), numbers(1, 32, 40)
    with pytest.raises(ValueError, match="multiple of two vectors"):
        PlaneProducts.apply(inputs, weights)
