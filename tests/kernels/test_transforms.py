"""Native transforms equal their definition in value and gradient, in any memory format."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from helpers import compiled, using
from psm.kernels import transforms
from psm.kernels.small_conv import TOOM_COOK
from psm.kernels.transforms import Matrix, transform_pixels, weight_planes
from psm.kernels.winograd import TILINGS

FORMATS = (torch.contiguous_format, torch.channels_last)
GS = {"4x4": TOOM_COOK[4, 3, 1, 1].g, "2x2": TOOM_COOK[2, 3, 1, 1].g, "stride 2": TILINGS[2].g, "1x1": ((1.0,),)}


def by_definition(weight: Tensor, g: Matrix) -> Tensor:
    """G w transpose(G), (planes, inner, columns), in double precision."""
    matrix = torch.tensor(g, dtype=torch.double)
    return torch.einsum("ak,ickl,bl->abic", matrix, weight.double(), matrix).flatten(0, 1)


def packed(planes: Tensor, width: int) -> Tensor:
    """(planes, pairs, inner, a pair of vectors)."""
    return planes.unflatten(2, (-1, 2 * width)).transpose(1, 2)


@compiled
@settings(deadline=None, max_examples=25)
@given(
    name=st.sampled_from(list(GS)),
    inner=st.sampled_from([1, 3, 32]),
    columns=st.sampled_from([32, 96]),
    memory_format=st.sampled_from(FORMATS),
    transposed=st.booleans(),
    slots=st.integers(1, 3),
    threads=st.integers(1, 3),
)
def test_weights_and_their_gradients(
    name: str, inner: int, columns: int, memory_format: torch.memory_format, transposed: bool, slots: int, threads: int
) -> None:
    g, taps = GS[name], len(GS[name][0])
    draws = torch.Generator().manual_seed(inner + columns)
    shape = (columns, inner) if transposed else (inner, columns)
    weight = torch.randn(*shape, taps, taps, generator=draws).to(memory_format=memory_format)
    weight = weight.transpose(0, 1) if transposed else weight
    width = transforms.simd_width()
    assert width is not None
    exact = by_definition(weight, g)
    grads = torch.randn(slots, *exact.shape, generator=draws)
    with using(threads):
        plain, pairs = (transforms.transform_weight(weight, g, packed=each) for each in (False, True))
        grad_weight = transforms.transform_grad_weight(grads, weight, g)
    torch.testing.assert_close(plain, exact.float(), rtol=1e-5, atol=1e-5)
    assert torch.equal(pairs.flatten(), packed(plain, width).flatten())
    leaf = weight.double().requires_grad_()
    (expected,) = torch.autograd.grad((by_definition(leaf, g) * grads.sum(0)).sum(), leaf)
    torch.testing.assert_close(grad_weight, expected.float(), rtol=1e-4, atol=1e-4)
    assert grad_weight.stride() == torch.empty_like(weight).stride()


@compiled
@pytest.mark.parametrize("size", [(4, 3, 1, 1), (2, 3, 1, 1), (4, 3, 2, 1)])
@pytest.mark.parametrize("what", ["pixels", "weight"])
def test_gradients_and_gradients_of_gradients(size: tuple[int, int, int, int], what: str) -> None:
    """Against the definitions, which run in double precision."""
    matrices, draws = TOOM_COOK[size], torch.Generator().manual_seed(0)
    pixels = what == "pixels"
    shape = (3, len(matrices.b[0]) ** 2, 32) if pixels else (5, 32, 3, 3)
    given = torch.randn(shape, generator=draws)

    def passes(given: Tensor) -> tuple[Tensor, ...]:
        leaf = given.clone().requires_grad_()
        transform, matrix = (transform_pixels, matrices.b) if pixels else (weight_planes, matrices.g)
        out = transform(leaf, matrix, matrix)
        (native,) = torch.autograd.grad(out.square().sum(), leaf, retain_graph=True)
        (grad,) = torch.autograd.grad(out.square().sum(), leaf, create_graph=True)
        (second,) = torch.autograd.grad(grad.square().sum(), leaf)
        return out.detach(), native, grad.detach(), second

    for fast, exact in zip(passes(given), passes(given.double()), strict=True):
        assert (fast - exact).abs().max() < 1e-5 * exact.abs().max()


@compiled
def test_axes_of_different_matrices_are_pytorch_s() -> None:
    rows, columns = TOOM_COOK[4, 3, 1, 1].g, TOOM_COOK[2, 3, 1, 1].g
    weight = torch.randn(4, 32, 3, 3, generator=torch.Generator().manual_seed(0))
    found = weight_planes(weight, rows, columns)
    exact = torch.einsum(
        "ak,oikl,bl->aboi", torch.tensor(rows).double(), weight.double(), torch.tensor(columns).double()
    )
    torch.testing.assert_close(found, exact.flatten(0, 1).float(), rtol=1e-5, atol=1e-5)
